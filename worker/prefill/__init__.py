"""The Prefill service: computes prompts, issues tickets, returns first tokens."""
