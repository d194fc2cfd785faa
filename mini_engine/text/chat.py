"""Chat templates: a conversation as the text that a model was trained on.

Templates come with downloaded models: the sandbox keeps them from reaching anything but the messages.
"""

import json
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox


def render(template: str, source: str, **variables: Any) -> str:
    """Return the template's text. Raises ValueError naming `source` if it is broken or refuses them."""
    try:
        return _compiled(template).render(variables)
    except Exception as error:  # a template is a program, and may fail in any way
        what = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template of {source} failed: {' '.join(what.split())}") from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """Return the template in Jinja set up as in transformers, so that it renders the same."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment.from_string(template)
