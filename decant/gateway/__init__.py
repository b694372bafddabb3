"""`decant gateway`: OpenAI's API over HTTP, by a client of the routers.

`app` routes a call; `chat` and `completions` make a `GenerationRequest` of its body, by the tables of `body_fields`,
and OpenAI's objects of what the client returns; `responses` writes them. The router tokenizes, renders, parses and
refuses.
"""
