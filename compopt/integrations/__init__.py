"""Integrations with DistributedDataParallel, FSDP2, Hugging Face and Lightning."""
