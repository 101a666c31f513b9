"""A whole deployment on a virtual clock: production schedulers, routing and queue policy, and a cost for each step."""
