"""What a decode worker does differently: policy, budgets, and its process."""
