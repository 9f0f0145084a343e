"""Makes the model with pictures known to vLLM, in each of its processes."""


def register() -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("Gemma4WithPictures", "picture_model:Gemma4WithPictures")
