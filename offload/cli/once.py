"""Flags whose second use would silently take the first one's place.

That is a habit of command lines, and of use for settings (an alias that says ``--ram 6GiB``, and
``--ram 2GiB`` behind it). Of inputs both are meant.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from offload.errors import OffloadError


def once(**way_out: str) -> type[TyperCommand]:
    """A kind of command that refuses the second use of a flag.

    Args:
        way_out: by the flag's parameter, what to do instead.
    """

    class Once(TyperCommand):
        def make_parser(self, ctx: Any) -> Any:
            parser: Any = super().make_parser(ctx)
            parse = parser.parse_args

            def checked(args: list[str]) -> Any:
                found = parse(args)
                names = [param.name for param in found[2]]
                for param in self.params:
                    if param.name in way_out and names.count(param.name) > 1:
                        flag = max(param.opts, key=len)
                        raise OffloadError(
                            f"{flag} is given {names.count(param.name)} times, and is one thing; "
                            f"{way_out[param.name]}"
                        )
                return found

            parser.parse_args = checked
            return parser

    return Once


__all__ = ["once"]
