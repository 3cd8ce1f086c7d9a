"""The model side: the three-phase prefill, model adapters, and the vLLM engine that runs them."""
