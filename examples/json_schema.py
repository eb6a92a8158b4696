"""An answer that follows a JSON schema. Text that the schema forces is drafted, so it costs few steps.

pip install 'lookfar[demo,structured]'
python examples/json_schema.py
"""

import json

import lookfar

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "population_in_thousands": {"type": "integer", "minimum": 1, "maximum": 50000},
        "climate": {"enum": ["tropical", "dry", "temperate", "continental", "polar"]},
    },
    "required": ["city", "country", "population_in_thousands", "climate"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}

lm = lookfar.load("demo")
messages = [{"role": "user", "content": "Describe a large city in South America as JSON."}]
answer = lm.chat(messages, json_schema=SCHEMA, max_new_tokens=80)

print(json.dumps(json.loads(answer.text), indent=2))
grammar = answer.stats.drafters.get("grammar")
print(f"{answer.stats.tokens} tokens in {answer.stats.steps} steps")
if grammar is not None:
    print(f"{grammar.accepted} of them were forced by the schema")
