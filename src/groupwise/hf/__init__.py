"""Everything about ``transformers.Trainer`` that is not specific to GRPO."""
