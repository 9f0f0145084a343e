"""The generated checkpoints are the same everywhere, and their tokenizer is a whole one."""

import hashlib

import checkpoints
import pytest
from safetensors.numpy import load_file


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("gemma4-31b", "66110307ef9aeb21b382a0a55efa31c0a9290af793898c889384712ebc7f622f"),
        ("gemma4-e2b", "ee0289cc9d9619973fadb17e845af4db6e637160a89dedd5e76506fc82f7d05a"),
        ("qwen3", "045b97fca4844b33e0530406cfe1a8931af39dfae0451258a66233bdb75d452d"),
    ],
)
def test_same_weights_on_every_machine(checkpoint, name, digest):
    weights = checkpoint(name) / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == digest
    assert weights.stat().st_size < 10 << 20


def test_another_seed_gives_other_weights(checkpoint, tmp_path):
    one = load_file(checkpoint("qwen3") / "model.safetensors")
    other = load_file(checkpoints.write("qwen3", tmp_path, seed=1) / "model.safetensors")
    assert one.keys() == other.keys()
    assert all((one[name] != other[name]).any() for name in one)


def test_any_text_has_tokens(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("gemma4-31b"))
    assert len(tokenizer) == checkpoints.VOCAB_SIZE
    for text in ("Grüß Gott,  世界\n", bytes(range(128)).decode()):
        tokens = tokenizer.encode(text)
        assert tokens[0] == tokenizer.bos_token_id
        assert len(tokens) == 1 + len(text.encode())
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
