"""Tokenizers and chat templates in the style of each family, written for the tests: small, with the same control tokens, order
of parts, tool formats and traps (trimmed texts, thoughts left out of history, refusals)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hftokens
import tinyfolder
from tokenizers import Tokenizer


@dataclass(frozen=True)
class FamilyText:
    """``model_type``: of the folder; ``make``: its tokenizer; ``end_names``: what ends a turn; ``eos``: as in
    tokenizer_config.json; ``generation``: further names in generation_config.json; ``bos``: what a raw prompt begins with."""

    model_type: str
    make: Callable[[], Tokenizer]
    template: str
    end_names: tuple[str, ...]
    eos: str
    generation: tuple[str, ...] = ()
    bos: str = ""
    as_file: bool = False


CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer a call as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content or '' %}
{%- if '</think>' in text and loop.index0 < ns.last %}{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' + text }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

LLAMA2 = """{%- if messages[0].role == 'system' %}
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Roles must alternate user/assistant') }}{%- endif %}
{%- if m.role == 'user' %}{{- bos_token + '[INST] ' + (system if loop.index0 == 0 else '') + m.content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""

MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}
{%- endif %}
{%- endfor %}"""

HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
INST = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
QWEN_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TEXTS = {
    "smollm2 and qwen2: chatml": FamilyText(
        "qwen2", lambda: hftokens.byte_level(tinyfolder.CONTROLS), CHATML, ("<|im_end|>", "<|endoftext|>"), "<|im_end|>"
    ),
    "qwen3: thoughts and tools": FamilyText(
        "qwen3",
        lambda: hftokens.byte_level(tinyfolder.CONTROLS, QWEN_PLAIN),
        QWEN3,
        ("<|im_end|>", "<|endoftext|>"),
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "llama 3: headers": FamilyText(
        "llama",
        lambda: hftokens.byte_level(HEADERS, bos="<|begin_of_text|>"),
        LLAMA3,
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        as_file=True,
    ),
    "llama 2: instructions": FamilyText("llama", hftokens.metaspace, LLAMA2, ("</s>",), "</s>", bos="<s>"),
    "mistral: instructions and tools": FamilyText(
        "mistral",
        lambda: hftokens.metaspace(INST, legacy=False),
        MISTRAL,
        ("</s>",),
        "</s>",
        ("</s>",),
        bos="<s>",
        as_file=True,
    ),
}


def write_folder(folder: Path, text: FamilyText) -> Tokenizer:
    """A model folder of the family with this tokenizer and template; the weights are random."""
    made = text.make()
    tinyfolder.write(folder, {"model_type": text.model_type, "vocab_size": 512}, tokenizer=False)
    config = {"eos_token": text.eos, "add_bos_token": bool(text.bos), "bos_token": {"content": text.bos} if text.bos else None}
    if text.as_file:
        (folder / "chat_template.jinja").write_text(text.template)
    else:
        config["chat_template"] = text.template
    hftokens.save(made, folder, **config)
    ids = [made.token_to_id(name) for name in text.generation]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids} if ids else {}))
    return made
