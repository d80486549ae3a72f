"""Which models the transformers engine serves. Imports nothing, so that checks before a start can
ask.
"""

TESTED_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""By `model_type` in the model's config, with the class: those whose answers over pages were shown
to be those of transformers' own attention.
"""
