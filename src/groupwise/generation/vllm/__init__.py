"""Generation with vLLM. Nothing here imports vLLM before it is used."""
