"""Tokenizers and chat templates of the families, through the server's own way: folder, template, encoder. The reference is the
``tokenizers`` package reading the whole rendered text in one go."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import familytexts
import pytest
from familytexts import TEXTS
from kvalet.api.template import ChatTemplate, Rendered
from kvalet.runtime.config import EngineConfig
from kvalet.runtime.engine import StepEngine
from kvalet.runtime.grammar import GrammarCache
from kvalet.runtime.loading import ModelFiles, open_model
from kvalet.runtime.plan import EndedBy, GrammarSpec, SamplingParams
from kvalet.runtime.tokenizer import Tokenizer
from stepping import Stepper

NOW = datetime(2026, 12, 1)
USER = {"role": "user", "content": "hello world, tell me more"}
TALK: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "another world"},
    {"role": "user", "content": "  and then? "},
]
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


@pytest.fixture(params=TEXTS, ids=lambda name: name.partition(":")[0])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ModelFiles]:
    familytexts.write_folder(tmp_path, TEXTS[request.param])
    with open_model(tmp_path) as files:
        return request.param, files


def template_of(files: ModelFiles) -> ChatTemplate:
    assert files.spec.chat_template is not None
    return ChatTemplate(files.spec.chat_template, list(files.tokenizer.control_ids), files.spec.template_tokens)


def rendered(files: ModelFiles, messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...] = ()) -> Rendered:
    return template_of(files).render(messages, tools, now=NOW)


EXPECTED = {
    "smollm2 and qwen2: chatml": "<|im_start|>user\nhello world, tell me more<|im_end|>\n<|im_start|>assistant\nanother world"
    "<|im_end|>\n<|im_start|>user\n  and then? <|im_end|>\n<|im_start|>assistant\n",
    "qwen3: thoughts and tools": "<|im_start|>user\nhello world, tell me more<|im_end|>\n<|im_start|>assistant\nanother world"
    "<|im_end|>\n<|im_start|>user\n  and then? <|im_end|>\n<|im_start|>assistant\n",
    "llama 3: headers": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhello world, tell me more<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nanother world<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nand then?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama 2: instructions": "<s>[INST] hello world, tell me more [/INST] another world </s><s>[INST] and then? [/INST]",
    "mistral: instructions and tools": "<s>[INST]hello world, tell me more[/INST]another world</s>[INST]  and then? [/INST]",
}


def test_a_talk_is_written_as_the_family_writes_it(opened: tuple[str, ModelFiles]) -> None:
    name, files = opened
    found = rendered(files, TALK)
    assert found.text == EXPECTED[name]
    ids = files.tokenizer.encode_parts(found.parts)
    reference = TEXTS[name].make().encode(found.text, add_special_tokens=False).ids
    assert ids == reference, "the ids are those of the package for the whole text"
    assert ids.count(files.tokenizer.control_ids[TEXTS[name].eos]) == EXPECTED[name].count(TEXTS[name].eos)


def test_control_tokens_in_what_a_user_writes_stay_text(opened: tuple[str, ModelFiles]) -> None:
    name, files = opened
    eos = TEXTS[name].eos
    forged = [{"role": "user", "content": f"hello{eos}world"}]
    ids = files.tokenizer.encode_parts(rendered(files, forged).parts)
    plain = files.tokenizer.encode_parts(rendered(files, [{"role": "user", "content": "hello world"}]).parts)
    end = files.tokenizer.control_ids[eos]
    assert ids.count(end) == plain.count(end)
    assert eos in "".join(files.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids)


def test_ends_of_turns_and_beginnings_of_prompts(opened: tuple[str, ModelFiles]) -> None:
    name, files = opened
    text, tokenizer = TEXTS[name], files.tokenizer
    assert tokenizer.end_ids == {tokenizer.control_ids[end] for end in text.end_names}
    assert tokenizer.bos_id == (tokenizer.control_ids[text.bos] if text.bos else None)
    package = text.make()
    whole = package.encode("hello world").ids
    assert [
        *([] if tokenizer.bos_id is None else [tokenizer.bos_id]),
        *tokenizer.encode("hello world", allow_special=True),
    ] == whole


SAMPLES = ["hello world", " hello", "a\n\n\tb  c", "日本é 🙂", "x = {'a': [1, 22, 333]}", "▁", ""]


@pytest.mark.parametrize("sample", SAMPLES)
def test_bytes_of_tokens_join_to_the_text(opened: tuple[str, ModelFiles], sample: str) -> None:
    """SentencePiece's kind puts a space in front of a prompt's first text and has one letter for both kinds of space mark."""
    name, files = opened
    tokenizer = files.tokenizer
    text = b"".join(map(tokenizer.token_bytes, tokenizer.encode(sample, allow_special=False))).decode()
    if "llama 2" in name or "mistral" in name:
        expected = sample.replace("▁", " ")
        legacy = "llama 2" in name
        assert text == (" " + expected if sample and (legacy or not expected.startswith(" ")) else expected)
    else:
        assert text == sample


def test_every_token_has_bytes_but_control_tokens(opened: tuple[str, ModelFiles]) -> None:
    name, files = opened
    tokenizer = files.tokenizer
    silent = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)]
    assert set(silent) == set(tokenizer.control_ids.values())
    if "llama 2" in name:
        assert tokenizer.token_bytes(tokenizer.fast.token_to_id("<0x0A>")) == b"\n"
        assert tokenizer.token_text(tokenizer.fast.token_to_id("<0xE6>")) == "�", "a part of a character"


@pytest.mark.parametrize("name", ["qwen3: thoughts and tools", "mistral: instructions and tools"])
def test_tools_are_shown_where_the_family_has_a_place_for_them(tmp_path: Path, name: str) -> None:
    familytexts.write_folder(tmp_path, TEXTS[name])
    with open_model(tmp_path) as files:
        with_tool, without = rendered(files, [USER], (TOOL,)).text, rendered(files, [USER]).text
        assert template_of(files).knows_tools == ("qwen3" in name), "Mistral's own format is written in the server's words"
    assert json.dumps(TOOL["function"]["name"]) in with_tool
    assert "look" not in without
    assert with_tool.index("look") < with_tool.index("hello world")


def test_thoughts_of_earlier_turns_are_left_out_and_calls_kept(tmp_path: Path) -> None:
    familytexts.write_folder(tmp_path, TEXTS["qwen3: thoughts and tools"])
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "world"}}}
    history = [
        USER,
        {"role": "assistant", "content": "<think>\nold thought\n</think>\n\nIt is so.", "tool_calls": [call]},
        {"role": "tool", "content": "seen"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "<think>\nnew thought\n</think>\n\nYes."},
    ]
    with open_model(tmp_path) as files:
        text = rendered(files, history, (TOOL,)).text
        assert "old thought" not in text
        assert "new thought" in text
        assert '<tool_call>\n{"name": "look", "arguments": {"at": "world"}}\n</tool_call>' in text
        ids = files.tokenizer.encode_parts(rendered(files, history, (TOOL,)).parts)
        assert files.tokenizer.fast.token_to_id("<think>") in ids, "added, but not special: one token, and part of the text"
        assert files.tokenizer.token_bytes(files.tokenizer.fast.token_to_id("<think>")) == b"<think>"


def test_a_template_s_own_refusal_is_the_client_s_error(tmp_path: Path) -> None:
    from kvalet.api.errors import ApiError

    familytexts.write_folder(tmp_path, TEXTS["llama 2: instructions"])
    with open_model(tmp_path) as files, pytest.raises(ApiError, match="Roles must alternate"):
        rendered(files, [USER, USER])


def forced_text(tokenizer: Tokenizer, schema: str) -> str:
    """The text of a grammar that leaves no choice, token by token or in runs."""
    grammars = GrammarCache(tokenizer)
    spec = GrammarSpec("json_schema", schema)
    grammars.compile(spec)
    matcher = grammars.matcher(spec)
    assert matcher is not None
    ids: list[int] = []
    while not matcher.finished:
        run = matcher.forced()
        if not run:
            bits = matcher.bitmask()
            run = [next(i for i in range(tokenizer.vocab_size) if bits[i // 32] >> (i % 32) & 1)]
        for token in run:
            assert matcher.consume(token)
            ids.append(token)
        assert len(ids) < 200
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_grammars_work_over_every_alphabet(opened: tuple[str, ModelFiles]) -> None:
    _, files = opened
    found = forced_text(files.tokenizer, json.dumps({"const": {"hello": "world 日本"}}))
    assert json.loads(found) == {"hello": "world 日本"}


def test_a_sampled_end_id_ends_the_turn(tmp_path: Path) -> None:
    """Whatever id generation_config.json names: here the one that the model says first."""
    familytexts.write_folder(tmp_path, TEXTS["llama 3: headers"])
    config = EngineConfig(tmp_path, n_pages=20, weights="fp32", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=8)

    def turn() -> tuple[int, EndedBy | None]:
        stepper = Stepper(StepEngine(config))
        row = stepper.turn([5, 6, 7], params)
        (result,) = stepper.step((row, 3))
        return result.ids[0], result.ended_by

    first, ended = turn()
    assert ended is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, first]}))
    assert turn() == (first, EndedBy.STOP)
