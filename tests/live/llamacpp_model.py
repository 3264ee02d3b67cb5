"""Makes a tiny random model for llama.cpp: run by the python of the environment that has ``gguf``.

Llama architecture, 2 layers, a vocabulary of bytes and a few letters; the answers are noise.
Usage: ``python llamacpp_model.py FILE``.
"""

import sys

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT = 64, 2, 4, 128, 8192
LETTERS = ("\u2581", *"etaonisrhlducmfpgwybvk")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def main(path: str) -> None:
    """Write the model to ``path``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    words = _vocabulary(writer)
    _weights(writer, words)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary(writer: gguf.GGUFWriter) -> int:
    """SentencePiece style: unknown, begin and end, all bytes, letters. Returns how many there are."""
    special = [(b"<unk>", 2, 0.0), (b"<s>", 3, 0.0), (b"</s>", 3, 0.0)]
    octets = [(f"<0x{octet:02X}>".encode(), 6, 0.0) for octet in range(256)]
    letters = [(letter.encode(), 1, -1.0) for letter in LETTERS]
    tokens = [*special, *octets, *letters]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_types([kind for _, kind, _ in tokens])
    writer.add_token_scores([score for _, _, score in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def _weights(writer: gguf.GGUFWriter, words: int) -> None:
    random = np.random.default_rng(1)

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.05).astype(np.float32))

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))

    matrix("token_embd.weight", words, WIDTH)
    ones("output_norm.weight")
    matrix("output.weight", words, WIDTH)
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm.weight")
        ones(f"blk.{layer}.ffn_norm.weight")
        for part in ("q", "k", "v", "output"):
            matrix(f"blk.{layer}.attn_{part}.weight", WIDTH, WIDTH)
        matrix(f"blk.{layer}.ffn_gate.weight", HIDDEN, WIDTH)
        matrix(f"blk.{layer}.ffn_up.weight", HIDDEN, WIDTH)
        matrix(f"blk.{layer}.ffn_down.weight", WIDTH, HIDDEN)


if __name__ == "__main__":
    main(sys.argv[1])
