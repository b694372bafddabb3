"""Chat templates in the style of the named model families, written for these tests."""

from __future__ import annotations

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\\n\\nToday: " ~ date_string ~ "\\n" ~ system_message }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles, not ' + message['role']) }}{% endif %}{% endfor %}"""

GEMMA = """{{ bos_token }}{% macro turn(role, text) -%}
<start_of_turn>{{ 'model' if role == 'assistant' else role }}
{{ text | trim }}<end_of_turn>
{% endmacro -%}
{% for m in messages if m.content %}
{% if loop.index > 4 %}{% break %}{% endif %}
{{ turn(m.role, m.content) }}{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

REASONING = """{% set state = namespace(last='', count=0) %}
{%- for message in messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content.split('</think>')[-1] }}{% endgeneration %}
{%- else %}{{ '<' ~ message.role ~ '>' ~ message.content }}{% endif %}
{%- set state.count = state.count + 1 %}{% set state.last = message.role %}
{%- endfor %}
{{ state.last }}{{ state.count }}{{ messages | tojson(indent=2) }}
{{- dict(a=1, b='<é>') | tojson }}{{ pad_token is defined }}{{ tools is none }}{{ documents is none }}"""

BARE = "{{ messages | map(attribute='content') | join(' ') }}"

LIKE = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "reasoning": REASONING,
    "bare": BARE,
}
