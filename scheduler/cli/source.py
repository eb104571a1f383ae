"""Where the training step of a command comes from: a factory of the user's, or a Hugging Face config.

Nothing is downloaded, and Hugging Face models are built on the ``meta`` device, without memory for their weights.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import typer
from torch import nn

DEFAULT_LONGEST = 1024  # tokens, where --seq is not given and the config allows more

_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step to plan.

    Attributes:
        model: the module.
        args: positional arguments of its forward.
        kwargs: keyword arguments of its forward.
        optimizer: whose state counts, or ``None``.

    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    optimizer: torch.optim.Optimizer | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSource:
    """What a user named on the command line; :meth:`build` makes the step, of any batch and length.

    Attributes:
        target: ``module:function`` or ``file.py:function``, or ``None``.
        hf: path of a Hugging Face ``config.json`` or name of a config class, or ``None``.
        overrides: ``KEY=VALUE`` for fields of that config.
        batch: sequences (or samples) of a batch; ``None`` for the factory's own, or 1.
        seq: tokens of a sequence; ``None`` for the factory's own, or the config's longest up to 1024.
        dtype: of the Hugging Face model's parameters.
        optimizer: name of a class in ``torch.optim``.

    Raises:
        typer.BadParameter: neither or both of target and hf are given, or options that do not go together.

    """

    target: str | None = None
    hf: str | None = None
    overrides: Sequence[str] = ()
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if (self.target is None) == (self.hf is None):
            raise typer.BadParameter("name the step: MODULE:FACTORY, or --hf CONFIG, and not both")
        if self.hf is None and (self.overrides or self.dtype):
            raise typer.BadParameter("--set and --dtype change a Hugging Face config: they need --hf")

    def describe(self, batch: int | None = None, seq: int | None = None) -> str:
        """The step in words, for headings."""
        named = self.hf or self.target or ""
        sizes = {"batch": batch or self.batch, "seq": seq or self.seq}
        return ", ".join([named, *(f"{key} {value}" for key, value in sizes.items() if value)])

    def build(self, *, batch: int | None = None, seq: int | None = None) -> Step:
        """Make the step; ``batch`` and ``seq`` replace the source's own.

        Raises:
            typer.BadParameter: the factory, the config or the optimizer cannot be found or used.

        """
        batch, seq = batch or self.batch, seq or self.seq
        if self.hf is not None:
            made = hf_step(self.hf, self.overrides, batch=batch or 1, seq=seq, dtype=self.dtype)
        else:
            made = factory_step(str(self.target), batch=batch, seq=seq)
        model, args, kwargs = made
        return Step(model, tuple(args), dict(kwargs), _optimizer(self.optimizer, model))


def factory_step(
    target: str, *, batch: int | None, seq: int | None
) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """Call a user's factory, with ``batch`` and ``seq`` where given.

    Raises:
        typer.BadParameter: it cannot be imported, takes no such argument, or returns something else.

    """
    factory = _load_factory(target)
    sizes = {name: value for name, value in (("batch", batch), ("seq", seq)) if value is not None}
    accepted = inspect.signature(factory).parameters
    flexible = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    refused = [name for name in sizes if name not in accepted and not flexible]
    if refused:
        names = " and ".join(refused)
        raise typer.BadParameter(f"{target} takes no argument {names}: add it to the function to vary it from here")
    made = factory(**sizes)
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
        raise typer.BadParameter(f"{target} must return (model, args, kwargs), and returned {type(made).__name__}")
    return made


def hf_step(
    hf: str, overrides: Sequence[str], *, batch: int, seq: int | None, dtype: str | None
) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """A language model of transformers on ``meta``, with a batch of token ids that are their own labels.

    Raises:
        typer.BadParameter: transformers is absent, or the config is unknown or of a model without token ids.

    """
    config = hf_config(hf, overrides)
    longest = int(getattr(config, "max_position_embeddings", 0) or DEFAULT_LONGEST)
    length = seq or min(longest, DEFAULT_LONGEST)
    if length > longest:
        raise typer.BadParameter(
            f"the config allows {longest} tokens: use --seq {longest}, or --set max_position_embeddings={length}"
        )
    with torch.device("meta"):
        model = _hf_model(config)
        ids = torch.empty(batch, length, dtype=torch.long)
    wanted = dtype or getattr(config, "dtype", None)
    if wanted is not None:
        model = model.to(_dtype(wanted))
    return model.train(), (), {"input_ids": ids, "labels": ids}


def _load_factory(target: str) -> Callable[..., Any]:
    module_name, separator, name = target.rpartition(":")
    if not separator or not name:
        raise typer.BadParameter(
            f"{target!r} is not MODULE:FACTORY, such as train.model:make_step or train.py:make_step"
        )
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else _import(module_name)
    except (ImportError, FileNotFoundError) as error:
        raise typer.BadParameter(f"{module_name} cannot be imported: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise typer.BadParameter(f"{module_name} has no function {name!r}")
    return factory  # type: ignore[no-any-return]


def _import(name: str) -> ModuleType:
    """Import by name, from the working directory too, as ``python -m`` does."""
    _search_in(pathlib.Path.cwd())
    return importlib.import_module(name)


def _search_in(folder: pathlib.Path) -> None:
    """Have imports look into a folder first."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _load_file(path: str) -> ModuleType:
    """Run a file as ``python FILE`` would, which finds what lies beside it."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    _search_in(file.resolve().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def hf_config(hf: str, overrides: Sequence[str]) -> Any:
    """A config of transformers, from its JSON or its class, with fields changed.

    Raises:
        typer.BadParameter: transformers is absent, or there is no such file, class or field.

    """
    try:
        import transformers
    except ImportError as error:
        raise typer.BadParameter("--hf needs transformers: pip install transformers") from error
    changes = dict(_override(text) for text in overrides)
    path = pathlib.Path(hf)
    if path.suffix == ".json" or path.is_dir():
        file = path / "config.json" if path.is_dir() else path
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{file} cannot be read as JSON: {error}", param_hint="--hf") from error
        if "model_type" not in fields:
            raise typer.BadParameter(f"{file} has no model_type: it is not a Hugging Face config", param_hint="--hf")
        model_type = fields.pop("model_type")
        try:
            known = transformers.AutoConfig.for_model(model_type, **fields)
            config = transformers.AutoConfig.for_model(model_type, **fields | changes)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--hf") from error
    else:
        kind = getattr(transformers, hf, None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig)):
            raise typer.BadParameter(
                f"{hf!r} is neither a config.json nor a config class of transformers (such as GPT2Config)",
                param_hint="--hf",
            )
        known, config = kind(), kind(**changes)
    for key in changes:
        if not hasattr(known, key):
            raise typer.BadParameter(
                f"{type(config).__name__} has no field {key!r}{_nearest(key, vars(known))}", param_hint="--set"
            )
    config.use_cache = False  # a training step has none, and returning one would keep its tensors
    return config


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _hf_model(config: Any) -> nn.Module:
    import transformers

    for name in _AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:  # noqa: SLF001 - the only list of which configs it takes
            return auto.from_config(config)  # type: ignore[no-any-return]
    raise typer.BadParameter(
        f"{type(config).__name__} is no language model with token ids: write a factory and name it as MODULE:FACTORY",
        param_hint="--hf",
    )


def _override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--set")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _dtype(wanted: Any) -> torch.dtype:
    found = wanted if isinstance(wanted, torch.dtype) else getattr(torch, str(wanted), None)
    if not isinstance(found, torch.dtype):
        raise typer.BadParameter(f"{wanted!r} is no dtype of torch, such as bfloat16", param_hint="--dtype")
    return found


def _optimizer(name: str | None, model: nn.Module) -> torch.optim.Optimizer | None:
    if name is None:
        return None
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise typer.BadParameter(f"torch.optim has no optimizer {name!r}, such as AdamW", param_hint="--optimizer")
    make: Callable[[Any], torch.optim.Optimizer] = kind
    return make([p for p in model.parameters() if p.requires_grad])
