"""Put the patch series on a pinned vLLM checkout, build it and test it."""
