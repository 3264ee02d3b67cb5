"""Small configs, one per family."""

from typing import Any

LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32,
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "q_lora_rank": 1536, "max_position_embeddings": 163840, "vocab_size": 129280,
    "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "num_hidden_layers": 26, "hidden_size": 1152, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6,
    "max_position_embeddings": 32768, "vocab_size": 262144, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_expand": 2, "max_position_embeddings": 262144, "vocab_size": 65536,
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "num_hidden_layers": 6, "hidden_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "hybrid_override_pattern": "MEM*-M", "mamba_num_heads": 16,
    "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 128, "conv_kernel": 4,
    "max_position_embeddings": 8192, "vocab_size": 1000,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "decoder_layers": 4, "decoder_attention_heads": 6, "d_model": 384,
    "max_target_positions": 448, "vocab_size": 51865,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
    "multi_query": True, "new_decoder_architecture": False, "max_position_embeddings": 2048,
    "vocab_size": 65024,
}  # fmt: skip
ALL = {
    "llama": LLAMA3_8B, "deepseek": DEEPSEEK, "gemma3": GEMMA3, "qwen_next": QWEN_NEXT, "jamba": JAMBA,
    "nemotron_h": NEMOTRON_H, "whisper": WHISPER, "falcon": FALCON,
}  # fmt: skip
