"""The version, apart from the package's face, which knows all that there is."""

__version__ = "0.1.0"
