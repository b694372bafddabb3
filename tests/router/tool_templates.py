"""Chat templates with tools in the style of the named model families, written for these tests."""

# ruff: noqa: E501 - templates

from __future__ import annotations

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n\\nYou may call these functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, write JSON within <tool_call></tool_call>:\\n<tool_call>\\n{"name": <name>,' }}
    {{- ' "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
           (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HERMES = """{%- macro json_type(schema) %}{{ schema.type | default('any') }}{% endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\nFunctions: <tools>' }}
    {%- for tool in tools %}{% set f = tool.function %}
        {{- '{"name": "' ~ f.name ~ '", "description": "' ~ f.name ~ '(' }}
        {%- for name, schema in f.parameters.properties | items %}
            {{- name ~ ': ' ~ json_type(schema) }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ') - ' ~ f.description ~ '", "parameters": ' ~ f.parameters | tojson ~ '}' }}
    {%- endfor %}
    {{- ' </tools> Answer <tool_call>\\n{"name": <name>, "arguments": <dict>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '\\n</tool_call>' }}
        {%- endfor %}<|im_end|>
{{ '' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n{"name": "' ~ message.name ~ '", "content": ' ~ message.content ~ '}' }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- system + '<|eot_id|>' }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first = messages[0].content | trim %}{% set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with {"name": function name, "parameters": dictionary}.\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('This model makes one call at a time.') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{ tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{ out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{ raise_exception('Ids have 9 characters.') }}{% endif %}
            {{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

DEEPSEEK = """{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message.role == 'system' %}{% set ns.system = message.content %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- if tools %}
    {%- for tool in tools %}{{ '\\n## ' + tool.function.name + '\\n' + tool.function.parameters | tojson }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and 'tool_calls' in message %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' + tool.function.name + '\\n```json\\n' }}
            {{- tool.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{{ '\\n' if not loop.last }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜>' + eos_token }}
    {%- elif message.role == 'assistant' %}{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

GPT_OSS = """{%- macro type_of(schema) -%}
    {%- if schema.type == 'array' %}{{ type_of(schema['items']) + '[]' }}
    {%- elif schema.enum is defined %}{{ schema.enum | map('tojson') | join(' | ') }}
    {%- else %}{{ schema.type | default('any') }}{% endif %}
{%- endmacro -%}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}{% set f = tool.function %}
        {{- '// ' + f.description + '\\ntype ' + f.name + ' = (_: {\\n' }}
        {%- for name, schema in f.parameters.properties.items() %}{{ name + ': ' + type_of(schema) + ',\\n' }}{% endfor %}
        {{- '}) => any;\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{% endif %}
        {%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{ '<|call|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson }}
        {{- '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

QWEN3_CODER = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{% set f = tool.function %}
        {{- '\\n<function>\\n<name>' ~ f.name ~ '</name>\\n<description>' ~ f.description ~ '</description>\\n<parameters>' }}
        {%- for name, schema in f.parameters.properties | items %}
            {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' ~ schema | tojson ~ '\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n</parameters>\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nCalls: <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n' }}
    {{- '</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}{% set call = tool_call.function %}
            {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- if value is string %}{{ value }}{% else %}{{ value | tojson }}{% endif %}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TOOL_TEMPLATES = {
    "qwen": QWEN,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "qwen3_coder": QWEN3_CODER,
}
CONTROL = {
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "qwen3_coder": ("<|im_start|>", "<|im_end|>"),
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
    "gpt_oss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
}
"""Special tokens of each template's tokenizer."""
