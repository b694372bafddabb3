"""Text to tokens and tokens to text: chat templates, tokenizing, detokenizing, stop strings. No gRPC.

Entry: ``served_model.Models``; each ``ServedModel`` owns a tokenizer and a chat template. Prompts enter
``prompt.prompt_of`` and leave as token ids; output tokens enter ``answer.new_answer`` and leave as reasoning, text and
calls.
"""
