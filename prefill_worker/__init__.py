"""What a prefill worker does differently: policy, budgets, and its process."""
