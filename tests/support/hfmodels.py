"""Models of the ``transformers`` package with random weights, saved as folders the way it saves them. Importing this takes
seconds: only tests/runtime/test_families.py does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hftokens
import torch
import transformers
from kvalet.runtime.batch import Segment
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import LoadedModel, load_model
from kvalet.runtime.forward import Forward
from kvalet.runtime.kvpool import KVPool
from torch import Tensor

transformers.utils.logging.disable_progress_bar()
VOCAB = 320
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
}


@dataclass(frozen=True)
class Case:
    """``heads``: query and KV heads. ``config``: fields beside the sizes. ``lengths``: of the rows that are compared."""

    family: str
    heads: tuple[int, int] = (4, 2)
    config: dict[str, Any] = field(default_factory=dict)
    layers: int = 3
    hidden: int = 48
    context: int = 256
    lengths: tuple[int, ...] = (75, 40, 21)
    seed: int = 0


def make(case: Case, folder: Path) -> Any:
    """The model, saved into ``folder`` together with a tokenizer. Every parameter is random, biases and norms included."""
    config_class, model_class = CLASSES[case.family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": case.hidden,
        "intermediate_size": 56,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads[0],
        "num_key_value_heads": case.heads[1],
        "max_position_embeddings": case.context,
    }
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 5}
    config = config_class(**(sizes | ids | case.config), attn_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
            else:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5, generator=generator)
    model.save_pretrained(folder)
    hftokens.save(hftokens.byte_level(("<|im_end|>",)), folder)
    return model


def loaded(folder: Path, **changes: Any) -> LoadedModel:
    return load_model(EngineConfig(folder, n_pages=2, threads=1, **({"weights": "fp32"} | changes)))


@torch.inference_mode()
def reference(model: Any, ids: list[int]) -> Tensor:
    """Logits [len(ids), vocab] of one pass over the whole sequence."""
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float()


def sequences(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in case.lengths]


@torch.inference_mode()
def driven(model: LoadedModel, rows: list[list[int]], piece: int, decodes: int, arena_tokens: int) -> list[dict[int, Tensor]]:
    """Feeds all rows through one ``Forward`` over pages that lie apart: prompts in pieces of ``piece``, row after row taking
    part in common steps, then the last ``decodes`` tokens of each in decode steps. Per row: position -> logits [vocab] of every
    position that was sampled."""
    config = EngineConfig(Path(), n_pages=2, weights="fp32", arena_tokens=arena_tokens, max_step_tokens=512, threads=1)
    geometry = model.spec.geometry("fp32")
    counts = [geometry.pages_for(len(ids)) for ids in rows]
    pool = KVPool(geometry, sum(counts) + 1)
    pool.poison(range(pool.n_pages))
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)) + 1
    tables = [tuple(part.tolist()) for part in order.split(counts)]
    forward = Forward(config, model.decoder, pool)
    at, found = [0] * len(rows), [dict[int, Tensor]() for _ in rows]
    while any(begin < len(ids) for begin, ids in zip(at, rows, strict=True)):
        segments, takers = [], []
        for row, ids in enumerate(rows):
            prompt = len(ids) - decodes
            n = min(piece, prompt - at[row]) if at[row] < prompt else min(1, len(ids) - at[row])
            if n:
                fed = tuple(ids[at[row] : at[row] + n])
                segments.append(Segment(row, at[row], fed, tables[row], at[row] >= prompt, True))
                takers.append((row, n))
        for (row, n), logits in zip(takers, forward(segments), strict=True):
            at[row] += n
            found[row][at[row] - 1] = logits
    return found


def old_style(folder: Path) -> None:
    """Rewrites config.json the way transformers 4 wrote it: rope_theta and rope_scaling, no rope_parameters."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(config))
