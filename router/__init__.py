"""The router: `api` receives calls and answers, `execution` owns requests, `attempt` runs them at `workers`."""
