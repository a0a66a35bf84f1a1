"""A file of requests answered without a server, in the format of OpenAI's batch API.

python examples/batch_file.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

questions = {"river": "Name a river.", "colour": "Name a colour.", "animal": "Name an animal."}
with tempfile.TemporaryDirectory() as folder:
    requests, answers = Path(folder) / "requests.jsonl", Path(folder) / "answers.jsonl"
    with requests.open("w") as file:
        for name, question in questions.items():
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0}
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    # The same as on the command line: quire run-batch -i requests.jsonl -o answers.jsonl
    command = [sys.executable, "-m", "quire.cli.main", "run-batch", "-i", str(requests), "-o", str(answers)]
    subprocess.run([*command, "--max-model-len", "1024"], check=True)
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        body = answer["response"]["body"]
        print(f"{answer['custom_id']}: {body['choices'][0]['message']['content']!r}")
