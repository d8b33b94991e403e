"""vLLM plugin: exports of WhiteMatter and LCKV models, served without their own code.

vLLM calls `register` in each of its processes. `check.py` refuses what is not supported, before a worker
starts; `model.py` and `lckv.py` are the models; `stack.py` is one evaluation of the layers that share a pool,
`prefill.py` the passes over a prompt, `sweeps.py` which tokens a pass takes together, `step.py` how some
tokens of an engine's step become a batch of their own, `attention.py` what a query reads from the pages.
"""


def register() -> None:
    """Make the model types known to transformers and vLLM. Imports nothing that another vLLM could lack."""
    from transformers import AutoConfig

    from whitematter_vllm.configuration import FAMILIES
    from whitematter_vllm.versions import tested

    for config_class in FAMILIES:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    if not tested():
        return  # a configuration of ours then says so when it is made; other models are not concerned

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from whitematter_vllm.check import Check

    for name, module in (("WhiteMatterForCausalLM", "model"), ("LCKVForCausalLM", "lckv")):
        ModelRegistry.register_model(name, f"whitematter_vllm.{module}:{name}")
        MODELS_CONFIG_MAP[name] = Check
