"""From a model of transformers or torch to one whose weights stream, packed or as they are."""
