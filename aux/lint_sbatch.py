#!/usr/bin/env python3
"""Find the mistakes in job scripts that cost a night: python aux/lint_sbatch.py my_job.sh

Each finding is a line, `FILE:LINE: mistake, reason: fix`. The exit status is 1 if there are any, 0
if there are none, and 2 if a file cannot be read. Run it where you run sbatch, because it also
looks for the log's folder, and for Slurm's version by `sbatch --version`, the only command that it
runs. A file that mentions neither #SBATCH nor srun nor Slurm's variables is not a job script, and
has no findings.
"""

import argparse
import difflib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Findings = Iterator[tuple[int, str]]  # line, sentence

# --- reading bash ---

# What can hide a # or a ; from bash: \# or 'a # b' or "a \" # b" or ${a#b}.
STRING = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}"""
# The group is the comment: in `echo a#b "#c" # d` it is "# d", and for a string it is empty.
COMMENT = re.compile(rf"{STRING}|(?<![^\s;&|()])(#[^\n]*)", re.S)
# `cat <<-'END' >file`, the lines of the text, and END. The groups are the line from << on, the
# quote, the word, and the lines below. `<<<"$a"` has no such lines.
HERE_DOCUMENT = re.compile(r"((?<!<)<<-?\s*([\"']?)\\?(\w+)\2.*\n)((?:.*\n)*?\s*\3)$", re.M)
# Up to four deep: `(date)`, `(date; (date))`.
PARENTHESES = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"
# In these, | and & and a line's end do not end a command: `...`, $(...), =(...), ((...)), 2>&1.
WHOLE = re.compile(rf"{STRING}|`[^`]*`|(?:[$=]|(?=\(\()){PARENTHESES}|[<>]&|&>", re.S)
END = re.compile(r"\|\||&&|;;|\|&|[;|&()\n]|\Z")

# What may stand before a command's name: `if ! A="1 2" timeout -k 5 --signal=INT 10m python`.
TIMEOUT = r"timeout(?: -(?:[ks]|-kill-after|-signal) \S+| -\S+)* \S+"
KEYWORD = rf"(?:[!{{]|if|then|elif|else|while|until|do|time|exec|nohup|{TIMEOUT})\s+"
ASSIGNMENT = r"""\w+=(?:"[^"]*"|'[^']*'|[^\s"'])*\s+"""


class Command(NamedTuple):
    """A simple command, or one with what stands before it, such as `if` or `A=1`."""

    line: int
    text: str
    end: str  # | or || or & or && or ; or a line's end

    @property
    def name(self) -> str:
        """`python` if the text is `if ! A=1 /usr/bin/python train.py`."""
        first = re.match(rf"(?:{KEYWORD}|{ASSIGNMENT})*(\S*)", self.text)[1]
        return first.rpartition("/")[2]


def blanks(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def read_bash(text: str) -> tuple[list[tuple[int, str]], list[Command]]:
    """The lines of a script that are comments, with their numbers, and its commands."""
    # What is no command becomes blanks, so that all other characters keep their places.
    text = HERE_DOCUMENT.sub(lambda found: found[1] + blanks(found[4]), text)
    code = COMMENT.sub(lambda found: blanks(found[0]) if found[1] else found[0], text)
    lines, rest = text.split("\n"), code.split("\n")
    is_comment = [bool(line.strip()) and not rest[i].strip() for i, line in enumerate(lines)]
    comments = [(i, line) for i, line in enumerate(lines, 1) if is_comment[i - 1]]

    flat = WHOLE.sub(lambda found: "_" * len(found[0]), code)
    commands, start = [], 0
    for end in END.finditer(flat):
        # A line that ends with a backslash goes on in the next one.
        words = code[start : end.start()].replace("\\\n", "  ")
        if words.strip():
            first = start + len(words) - len(words.lstrip())
            commands.append(Command(text.count("\n", 0, first) + 1, words.strip(), end[0]))
        start = end.end()
    return comments, commands


# --- what the script says ---

SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-G": "gpus", "-o": "output"}
SHORT |= {"-e": "error", "-J": "job-name", "-D": "chdir", "-K": "kill-on-bad-exit", "-t": "time"}
# Commands whose arguments may mention other commands, but do not run them.
SPEAK = r"echo|printf|die|log|note|info|warn|error|cat|logger|grep|sed|which|type|trap|p(kill|grep)"
# torchrun or torch.distributed.run, but not my.torchrun, torchrun.sh or torchrun-env.
TORCHRUN = r"(?<![\w.])(?:torchrun|torch\.distributed\.(?:run|launch))(?![\w./-])"
# $SLURM_PROCID, if the text is the shell's: in "...", but not in '...' or behind a backslash.
RANK_VARIABLE = re.compile(r"(?<!\\)\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))")
# --standalone, --nnodes=1 or --nnodes 1, but not --nnodes=1:4.
ALONE = re.compile(r"--standalone|--nnodes[ =]+1(?![\w:.])")
STARTERS = r"torchrun|python[\d.]*|accelerate|deepspeed|apptainer|singularity"
# A starter such as python3 or bash, a script such as a.py, or "$@". Not A=python or my-bash.
TRAINS = rf"{TORCHRUN}|(?<![\w=.:-])(?:{STARTERS}|bash)(?![\w.])|\.(?:py|sh)\b|\$@"
# Commands that prepare a training run, or show something.
ASIDE = r"hostname|nvidia-smi|date|lscpu|free|df|ls|mkdir|cp|rsync|rm|tar|mv|ln|chmod|touch|unzip"
ASIDE += r"|gunzip|find|cd|export|set|echo|sleep|env|:|true"


def misspelt(line: str) -> bool:
    """`#SBTACH --nodes=2`, but not `##SBATCH`, by which a line is switched off, or `#BSUB`."""
    word = re.match(r"#([A-Z]+)\s+-", line)
    near = word and difflib.get_close_matches(word[1], ["SBATCH"], cutoff=0.8)
    return bool(near) and word[1] != "SBATCH"


def first_number(text: str | None) -> int:
    """2 for "2-4"; 0 for a text without a number, and for None."""
    found = re.search(r"\d+", text or "")
    return int(found[0]) if found else 0


def options(text: str) -> dict[str, str]:
    """Slurm's options in `text` by their long names, with their values: `-N2 --exclusive` is
    {"nodes": "2", "exclusive": ""}."""
    words = re.sub("[\"']", "", text).split(" #")[0].split()
    found = {}
    for place, word in enumerate(words, 1):
        following = words[place] if place < len(words) else "-"
        value = "" if following.startswith("-") else following
        if match := re.fullmatch(r"--([a-z][a-z-]+)(?:=(.*))?", word, re.S):
            found[match[1]] = value if match[2] is None else match[2]
        elif word[:2] in SHORT:
            found[SHORT[word[:2]]] = word[2:] or value
    return found


@functools.cache
def slurm_version() -> tuple[int, int]:
    """(23, 2) of `slurm 23.02.7`. Without a Slurm that answers, that of the newest known."""
    try:
        command = ["sbatch", "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    found = re.search(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (26, 5)


def shell_strings(text: str) -> list[tuple[str, str]]:
    """The strings that shells in `text` run: ("bash", "cd a && ls") of `bash -lc 'cd a && ls'`."""
    option = r"(?:-\S+\s+|pipefail\s+)*?-\w*c\s+"
    strings = re.finditer(rf"(?<![\w.-])(\w*sh)\s+{option}(['\"])((?:\\.|(?!\2).)*)\2", text, re.S)
    return [(found[1], found[3]) for found in strings]


class Script:
    """A job script taken apart: its directives, its commands, the values of its variables."""

    def __init__(self, path: Path):
        self.path = path
        self.text = path.read_bytes().decode(errors="replace").replace("\r\n", "\n")
        self.is_job = bool(re.search(r"#\s*(?i:SBATCH)|\bsrun\b|\bSLURM_", self.text))
        self.is_job |= any(map(misspelt, self.text.splitlines()))
        self.comments, self.commands = read_bash(self.text)
        self.body = [command for command in self.commands if not re.fullmatch(SPEAK, command.name)]

        # Slurm reads directives only up to the first command.
        self.end = self.commands[0].line if self.commands else sys.maxsize
        self.directives = {i: line for i, line in self.comments if line.startswith("#SBATCH")}
        self.asked, self.asked_at = {}, {}
        for line, text in self.directives.items():
            found = options(text.removeprefix("#SBATCH")) if line < self.end else {}
            self.asked |= found
            self.asked_at |= dict.fromkeys(found, line)
        self.nodes = self.number("nodes")
        per_node = max(self.number("ntasks-per-node"), 1)
        self.tasks = self.number("ntasks") or max(self.nodes, 1) * per_node

        # A="1 2", A='1', A=(1 2), A=$(date) or A=1, with = or +=. All values of a name count.
        self.values: dict[str, str] = {}
        value = r"(\"(?:\\.|[^\"])*\"|'[^']*'|\([^()]*\)|\$\([^()]*\)|\S+)"
        for command in self.commands:
            for name, text in re.findall(rf"(?<![\w-])(\w+)\+?={value}", command.text):
                # A=$(python3 a.py): what it prints is not known.
                if re.match(rf'"?\$\([^(]*\b({STARTERS})\s', text):
                    continue
                # In A="$A --more" the name stands for what is there already.
                more = re.sub(rf"\$\{{?{name}\b", "", text.strip("\"'()"))
                self.values[name] = f"{self.values.get(name, '')} {more}"

        # The command, but not my-srun, --with=srun or "srun.
        srun = re.compile(r"(?<![\w.=\"'-])srun\s")
        self.sruns = [command for command in self.body if srun.search(command.text)]
        starts = re.compile(rf'srun|{STARTERS}|"\$@"')
        starters = [command for command in self.body if starts.fullmatch(command.name)]
        self.trainings = [each for each in starters if re.search(TRAINS, self.expanded(each))]

        # `trap -- 'save now' USR1 SIGTERM`: the action, and the signals.
        trap = re.compile(r"trap\s+(?:--\s+)?(\S.*?)((?:\s+(?:SIG)?[A-Z]+[12]?)+)$", re.S)
        traps = [found for command in self.commands if (found := trap.match(command.text))]
        self.trapped = " ".join(found[2] for found in traps if found[1] != "-")
        # After trap '' and trap : nothing handles the signal.
        handlers = [found for found in traps if found[1] not in ("''", '""', "-", ":")]
        self.handled = " ".join(found[2] for found in handlers)
        # `trap 'told=1' TERM` only sets a variable, and Slurm itself sends TERM to the ranks.
        later = r"(['\"]?)\w+=\w*\1"
        urgent = [each for each in handlers if "USR" in each[2] or not re.fullmatch(later, each[1])]
        self.urgent = " ".join(found[2] for found in urgent)

    def number(self, option: str) -> int:
        return first_number(self.asked.get(option))

    def expanded(self, command: Command) -> str:
        """The command with the values of the variables that the script itself sets."""
        # $A, ${A} or ${A[@]}. A value may have a variable, whose value may have another one.
        text, variable = command.text, re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
        for _ in range(3):
            text = variable.sub(lambda found: self.values.get(found[1], found[0]), text)
        return text

    def line_of(self, text: str, command: Command) -> int:
        """Where this text of an expanded command is written."""
        return next((each.line for each in self.body if text in each.text), command.line)

    def sources(self, text: str, suffix: str) -> list[str]:
        """The contents of the files that `text` names, from here or from the script's folder."""
        # From a word's first character, because a word may be long: a file in base64, say.
        names = re.findall(rf"(?<![\w./-])[\w./-]+{re.escape(suffix)}\b", text)
        files = {Path(folder, name) for name in names for folder in (".", self.path.parent)}
        # Path.is_file() would raise an error if a name is too long.
        files = [file for file in files if os.path.isfile(file) and os.access(file, os.R_OK)]
        return [file.read_text(errors="replace") for file in files]


def expanded_here(text: str) -> re.Match | None:
    """A variable of a rank that the shell of this text expands."""
    return RANK_VARIABLE.search(re.sub(r"""("(?:\\.|[^"\\])*(?:"|\Z))|'[^']*'""", r"\1", text))


def nodes_of(script: Script, command: Command) -> int:
    """On how many nodes a command starts: its srun may say less than the header."""
    text = script.expanded(command)
    srun = options(re.split(TRAINS, text)[0]) if command in script.sruns else {}
    return first_number(srun.get("nodes")) or script.nodes


def only_prepares(command: Command) -> bool:
    """Whether an srun trains nothing: `srun hostname`, `srun bash -c 'mkdir a && cp b a'`."""
    started = command.text.partition("srun")[2]
    # After options such as -N2 or --exclusive, the command's name.
    names = re.findall(r"^(?:\s+-\S+)*\s+([\w-]+)", started)
    if strings := shell_strings(started):
        names = [inner.name for _, text in strings for inner in read_bash(text)[1]]
    return bool(names) and all(re.fullmatch(ASIDE, name) for name in names)


# --- mistakes ---


def directives_not_read(script: Script) -> Findings:
    """Directives that Slurm ignores, or whose variables it does not expand."""
    for line, text in script.comments:
        if misspelt(text) or re.match(r"(\s*#\s+SBATCH|\s+#SBATCH|#sbatch)\s+-", text):
            yield line, "Slurm takes this line for a comment: begin it with #SBATCH"
    for line, text in script.directives.items():
        if line > script.end:
            why = "where Slurm has stopped reading"
            yield line, f"a directive after the first command, {why}: move it to the top"
        if "$" in text.split(" #")[0]:
            how = "%j, %x or %u, or sbatch's command line"
            yield line, f"a variable in a directive, which Slurm does not expand: {how}"


def time_limit(script: Script) -> Findings:
    """2:00 is two minutes, and not two hours. For 30:00 that is what one means."""
    asked = re.fullmatch(r"0*([1-9]|12|24|36|48|72|96|168):00", script.asked.get("time", ""))
    if asked:
        minutes = "a minute" if asked[1] == "1" else f"{asked[1]} minutes"
        how = f"{asked[1]}:00:00 for hours, or else --time={asked[1]}"
        yield script.asked_at["time"], f"--time={asked[0]} is {minutes}: {how}"


def no_log_folder(script: Script) -> Findings:
    """Slurm opens the log before the job runs, and makes no folder for it."""
    for option in script.asked.keys() & {"output", "error"}:
        name, line = script.asked[option], script.asked_at[option]
        folder = Path(name).parent
        places = Path(script.asked.get("chdir", ".")), script.path.parent
        # A cluster's /scratch is not on every machine that checks its scripts.
        elsewhere = folder.is_absolute() and not os.path.exists(Path(*folder.parts[:2]))
        if "%" in str(folder):
            why = "before the job runs, and before Slurm 23.11 it dies without a word"
            yield line, f"no folder {folder} for the log {why}: only name%j"
        elif not elsewhere and not any(os.path.isdir(place / folder) for place in places):
            why = "and before Slurm 23.11 the job dies without a word"
            yield line, f"no folder {folder} for the log, {why}: mkdir before sbatch"
        if "%x" in name and "/" in script.asked.get("job-name", ""):
            why = "which has a /, so the log has no folder"
            yield line, f"%x is the job's name, {why}: take the / out of --job-name"


def lost_log(script: Script) -> Findings:
    """Slurm truncates the log at each start, unless the site has set JobFileAppend. One name for
    all jobs is overwritten by each of them anyway."""
    own = re.search("%[jA]", script.asked.get("output", "slurm-%j.out"))
    if own and "requeue" in script.asked and "open-mode" not in script.asked:
        what = "--requeue, and the next start overwrites the log, with its last error"
        yield script.asked_at["requeue"], f"{what}: --open-mode=append"


def torchrun_alone(script: Script) -> Findings:
    """A torchrun that knows of one node, started on several."""
    for command in script.body:
        text = script.expanded(command)
        alone, nodes = ALONE.search(text), nodes_of(script, command)
        if alone and nodes > 1 and re.search(TORCHRUN, text):
            why = "training runs that do not know of each other"
            how = '--nnodes="$SLURM_JOB_NUM_NODES" and one --rdzv-endpoint for all'
            line = script.line_of(alone[0], command)
            yield line, f"{alone[0]} on {nodes} nodes, {why}: {how}"


def no_srun(script: Script) -> Findings:
    """Several tasks or nodes asked for, and nothing that starts a process for each of them."""
    starts = r"srun|mpirun|mpiexec|ibrun|jsrun|aprun|prun|ssh|pdsh|clush|parallel|deepspeed"
    for command in script.body:
        started = re.search(rf"\b({starts})\b(?![.=-])", script.expanded(command))
        if started and not only_prepares(command):
            return
    found = []
    for command in script.trainings:
        text, name = script.expanded(command), command.name
        # These start a process for each GPU, but only on their own node.
        on_a_node = re.search(rf"{TORCHRUN}|\baccelerate\b", text)
        several = script.nodes if on_a_node else script.tasks
        # Several in the background are tasks as well, and "$@" may be srun.
        if several < 2 or command.end == "&" or name == '"$@"':
            continue
        # python train.py, python -m train or python $SCRIPT trains; python -m venv does not.
        if not re.search(r"\.py\b|\s-m\s*(?!pip|venv)\w|\$", text):
            continue
        asked = f"{several} {'tasks' if several > script.nodes else 'nodes'}"
        how = "srun --ntasks-per-node=1" if on_a_node else "srun"
        why = f"so it starts once, though the header asks for {asked}"
        main = re.search("train|torch|main", command.text)
        found.append((not main, command.line, f"{name} without srun, {why}: {how} {name} ..."))
    if found:
        # One that looks like the training run, or else the first.
        _, line, sentence = min(found)
        yield line, sentence


def rank_variables(script: Script) -> Findings:
    """$SLURM_PROCID outside of single quotes is the batch shell's."""
    if not script.directives and not script.sruns:
        return
    for command in script.body:
        if found := expanded_here(command.text):
            why = "where it is always 0"
            how = "read it inside srun, in a script or in srun bash -c '...' with single quotes"
            yield command.line, f"{found[1]} expanded in the batch shell, {why}: {how}"


def order_of_tasks(script: Script) -> Findings:
    """SLURM_PROCID for a rank in a task, while the ranks meet at the first host of the list."""
    is_job = script.directives or script.sruns
    for command in script.body:
        # In a job's own shell the variable is wrong anyway. A file that srun starts has it right.
        if is_job and (command not in script.sruns or expanded_here(command.text)):
            continue
        text = "\n".join([script.expanded(command), *script.sources(command.text, ".sh")])
        names = r"\b(?:NODE_|GROUP_|MACHINE_)?RANK|--rank|--(?:node|machine)[-_]rank"
        found = re.search(rf"({names})[ =][\"']?\\?\$\{{?SLURM_PROCID\b", text)
        everything = f"{script.text}\n{text}"
        meets = r"(?i)master[-_](?:addr|port)|main_process_ip|rdzv[-_]endpoint"
        listed = re.search(r"scontrol show hostnames?\b", everything)
        if not found or not listed or not re.search(meets, everything):
            continue
        # The C10d rendezvous numbers the nodes by itself.
        if nodes_of(script, command) == 1 or re.search(r"rdzv[-_]backend[ =]c10d", text):
            continue
        how = "SLURM_NODEID"
        if found[1] in ("RANK", "--rank"):
            how += " x tasks per node + SLURM_LOCALID"
        why = "but with a topology plugin task 0 need not be on the first node, and all wait for it"
        yield command.line, f"{found[1]} is SLURM_PROCID, {why}: {how}"


def restarts(script: Script) -> Findings:
    """torchrun's own restarts, where its nodes do not agree on one."""
    for command in script.body:
        nodes = nodes_of(script, command)
        for text in (script.expanded(command), *script.sources(command.text, ".sh")):
            asked = re.search(r"--max[-_]restarts[ =]+[\"']?([1-9]\d*)", text)
            agree = re.search(r"rdzv[-_]backend[ =]+[\"']?(?!static)\w", text) or ALONE.search(text)
            if not asked or agree or nodes < 2 or not re.search(TORCHRUN, text):
                continue
            what = f"--max-restarts={asked[1]} on {nodes} nodes with a static rendezvous"
            why = "where a restarted node meets addresses of the first start and fails, or hangs"
            line = script.line_of(asked[0], command)
            yield line, f"{what}, {why}: requeue the job instead"


def devices(script: Script) -> Findings:
    """GPUs that are asked for twice, chosen by hand, or numbered by rank although each rank sees
    one."""
    gres = re.split("[,:]", script.asked.get("gres", ""))
    if "gpus-per-node" in script.asked and "gpu" in gres:
        what = "--gres=gpu beside --gpus-per-node, which Slurm 26.05 refuses"
        yield script.asked_at["gres"], f"{what}: one of the two"
    if "cpus-per-gpu" in script.asked:
        why = "which srun's --cpus-per-task contradicts, and which some clusters refuse"
        message = "Requested node configuration is not available"
        what = f"--cpus-per-gpu, {why} ({message})"
        yield script.asked_at["cpus-per-gpu"], f"{what}: --cpus-per-task"
    for command in script.body:
        if re.search(r"\bCUDA_VISIBLE_DEVICES=[\"']?\d", command.text):
            why = "but Slurm has chosen this job's GPUs"
            yield command.line, f"CUDA_VISIBLE_DEVICES hard-coded, {why}: remove it"
    asked = [(script.asked_at.get("gpus-per-task", 0), script.asked)]
    asked += [(command.line, options(script.expanded(command))) for command in script.sruns]
    sources = [script.text, *script.sources(script.text, ".py")]
    by_local_rank = re.compile(r"(?i)set_device\([^)\n]*local_?(rank|id)")
    for line, given in asked:
        if given.get("gpus-per-task") == "1" and any(map(by_local_rank.search, sources)):
            what = "--gpus-per-task=1 and set_device(local_rank), each rank sees one GPU, number 0"
            why = "and the second one dies of an invalid device ordinal"
            yield line, f"{what}, {why}: --gpus-per-node"


def cpus_for_gpus(script: Script) -> Findings:
    """A GPU's rank needs a CPU to compute, and more to load data."""
    asked, nodes = script.asked, max(script.nodes, 1)
    times = {"gpus": 1, "gpus-per-node": nodes, "gres": nodes, "gpus-per-task": script.tasks}
    by = [name for name in times if name in asked and (name != "gres" or "gpu" in asked[name])]
    others = asked.keys() & {"exclusive", "mincpus", "ntasks-per-gpu"}
    if not by or others or not script.trainings:
        return
    # 4, a100:4, gpu:a100:4, or gpu:a100, which is one
    count = re.search(r"(?:^|:)(\d+)(?:,|$)", asked[by[0]].rpartition("gpu")[2])
    gpus = times[by[0]] * int(count[1] if count else 1)
    cpus = gpus * script.number("cpus-per-gpu")
    cpus = cpus or script.tasks * max(script.number("cpus-per-task"), 1)
    written = [name for name in ("cpus-per-task", "cpus-per-gpu") if name in asked]
    line = script.asked_at[written[0] if written else by[0]]
    # An EDIT comment says that the number is one to change.
    if cpus < 2 * gpus and "EDIT" not in script.directives[line]:
        what = "fewer than 2 CPUs for each GPU"
        if not written:
            what = "one CPU for each task, unless the partition has DefCpuPerGPU"
        how = "--cpus-per-task, with about 8 for each GPU"
        yield line, f"{what}, and the GPUs wait for data: {how}"


def addresses(script: Script) -> Findings:
    """A port in MASTER_PORT=29500, MASTER_PORT=${MASTER_PORT:-29500}, --master-port 29500 or
    --rdzv-endpoint=node:29500; and an address of which other nodes may know nothing."""
    port = r"MASTER_PORT=[\"']?(?:\$\{\w+:-)?|--(?:master|main_process)[-_]port[ =]"
    port = rf"(?:{port}|--rdzv[-_]endpoint[ =]\S+:)([1-9]\d*)"
    address = r"(?:MASTER_ADDR=|--(?:master[-_]addr|rdzv[-_]endpoint)[ =])(.*)"
    local = r"|^\W*(?:localhost|127\.\d+\.\d+\.\d+)" if script.nodes > 1 else ""
    local = rf"/etc/hosts|SLURM_LAUNCH_NODE_IPADDR{local}"
    # Frontier's user guide advises $(hostname -i), and its jobs load this module.
    if "rccl-net-plugin" not in script.text:
        local += r"|hostname +(?:-[iI]\b|--ip-address)"
    for command in script.body:
        if found := re.search(port, command.text):
            why = "and two jobs on a node disturb each other"
            how = "MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))"
            yield command.line, f"port {found[1]} hard-coded, {why}: {how}"
        value = re.search(address, script.expanded(command), re.S)
        if value and (found := re.search(local, value[1])):
            place = found[0].strip("\"' ")
            what = f"the address is from {place}, which other nodes may not reach"
            how = 'the first line of scontrol show hostnames "$SLURM_JOB_NODELIST"'
            yield command.line, f"{what}: {how}"


def exit_status(script: Script) -> Findings:
    """Nobody looks at a failed job that ends as COMPLETED, and the jobs that depend on it start."""
    why = "and a failed job ends as COMPLETED"
    sets = [each.line for each in script.commands if re.match(r"set\s.*\bpipefail", each.text)]
    pipefail = min([*sets, sys.maxsize])
    for command in script.body:
        pipe = re.search(r"scontrol show hostnames?\b[^|()]*\|\s*head\b", command.text)
        if pipe and command.line > pipefail:
            what = "scontrol into head under pipefail, where SIGPIPE ends a job with a long list"
            yield command.line, f"{what}: hosts=$(scontrol ...), then ${{hosts%%$'\\n'*}}"
    for command in script.trainings:
        piped = command.end in ("|", "|&") and command.line < pipefail
        if piped and "PIPESTATUS" not in script.text:
            yield command.line, f"a pipe hides the exit status, {why}: set -o pipefail"

    # After `set -e` or `bash -e`, or if the script reads $?, the status is not lost. In a script
    # with functions, the last training run may not be what runs last.
    strict = r"^#!.*\s-\w*e|^\s*set\s+(-\w*e|.*\berrexit)|\$\?|^\s*[\w-]+ *\(\)"
    if re.search(strict, script.text, re.M) or not script.trainings:
        return
    command = script.trainings[-1]
    after = script.commands[script.commands.index(command) + 1 :]
    after = [each for each in after if not re.match(r"(fi|done|esac)\b|[})]|exit$", each.text)]
    if command.end in ("\n", ";") and after:
        what = f"the job's status is that of {after[-1].name} in line {after[-1].line}"
        yield command.line, f"{what}, {why}: set -e at the top"


def srun_options(script: Script) -> Findings:
    """Options that srun needs each time, on its command line or as a variable."""
    sets = " ".join(script.values)
    for command in script.sruns:
        before, *training = re.split(TRAINS, script.expanded(command))
        # Options in a variable of this name may be set in another file.
        unknown = re.search(r"\$\{?\w*(srun|opt|arg|flag)\w*", before, re.I)
        if not training or unknown or only_prepares(command):
            continue
        given = options(before)
        asked = script.asked | given
        sizes = [asked.get(name, "1") for name in ("nodes", "ntasks", "ntasks-per-node")]
        several = given.get("ntasks") != "1" and sizes != ["1", "1", "1"]
        if several and "kill-on-bad-exit" not in given and "SLURM_KILL_BAD_EXIT" not in sets:
            what = "srun lets the others wait for a failed rank until the time limit"
            yield command.line, f"{what}: --kill-on-bad-exit=1"
        passed = "cpus-per-task" in given or "--cpus-per-task" in before
        lost = "cpus-per-task" in script.asked and not passed and "SRUN_CPUS_PER_TASK" not in sets
        if lost and (22, 5) <= slurm_version() < (23, 11):
            why = "Slurm 22.05 and 23.02 do not hand it on, and a rank gets one CPU"
            how = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'
            yield command.line, f"srun without --cpus-per-task, {why}: {how}"


def traps(script: Script) -> Findings:
    """A trap needs a training run in the background, and a shell that waits until it has ended."""
    foreground = [command for command in script.trainings if command.end != "&"]
    if re.search("USR|TERM" if script.directives else "USR", script.urgent):
        for command in foreground:
            what = f"{command.name} in the foreground of a shell with a trap"
            why = "bash runs the trap only after the command has ended"
            yield command.line, f"{what}, {why}: add & and wait for it"

    waits = re.findall(r"^[^#\n]*\bwait\b", script.text, re.M)
    # A script that loops or requeues the job may leave the rest to the next start.
    again = re.search(r"^[^#\n]*(\b(while|until|for)\b|requeue)", script.text, re.M)
    if not script.trainings or script.trainings[-1].end != "&":
        return
    command = script.trainings[-1]
    if script.directives and not foreground and not waits:
        why = "and the job ends before it"
        yield command.line, f"{command.name} in the background, {why}: add wait"
    if re.search("USR|TERM", script.handled) and len(waits) == 1 and not again:
        why = "wait ends when the trap has run, and the job with it, before anything is saved"
        how = "wait again until it has ended"
        yield command.line, f"{command.name} is waited for once, but {why}: {how}"


def signals(script: Script) -> Findings:
    """--signal=USR1@120 is for srun's tasks, and --signal=B:USR1@120 for the batch shell."""
    # USR1, SIGUSR1@120 or R:USR1@120. B:... does not match.
    asked = re.fullmatch(r"R?:?(?:SIG)?(\w+)(?:@.*)?", script.asked.get("signal", ""))
    name = asked[1] if asked else ""
    if name and name in script.handled:
        how = f"let the train script handle it, or say --signal=B:{name}@..."
        yield script.asked_at["signal"], f"{name} reaches the ranks, not this shell's trap: {how}"
    of_shell = re.fullmatch(r"R?B:(?:SIG)?([A-Z]+[12]?)(?:@.*)?", script.asked.get("signal", ""))
    # A command behind exec takes the shell's place. The trap may stand in a file that is sourced.
    becomes = [each for each in script.commands if re.match(r"exec\s+[^<>&{\d]", each.text)]
    if of_shell and of_shell[1] not in script.handled and not becomes:
        texts = [script.text, *script.sources(script.text, ".sh")]
        if not any(re.search(rf"\btrap\b.*\b(SIG)?{of_shell[1]}\b", text) for text in texts):
            what = f"{of_shell[1]} ends this shell, which has no trap for it, and so the job"
            how = f"set a trap, or say --signal={of_shell[1]}@... if the train script handles it"
            yield script.asked_at["signal"], f"{what}: {how}"
    # An urgent trap is a mistake by itself, see traps().
    waits = any(command.end != "&" for command in script.trainings)
    idle = of_shell and of_shell[1] in script.trapped and of_shell[1] not in script.urgent
    if idle and waits:
        what = f"{of_shell[1]} reaches this shell, which waits, and not the ranks"
        yield script.asked_at["signal"], f"{what}: --signal={of_shell[1]}@..."
    # `kill -USR1 "$pid"` or `scancel --signal=USR1 "$SLURM_JOB_ID"` in the script itself.
    told = r"\b(?:kill|scancel)\b.*(?:-|--signal[= ]|-s *)(?:SIG)?(USR[12])"
    if not name.startswith("USR"):
        told = re.search(told, script.text)
        name = told[1] if told else ""
    if not name:
        return
    for command in script.body:
        handles = rf"signals[-_]to[-_]handle[ =]\S*{name}"
        if re.search(TORCHRUN, command.text) and not re.search(handles, script.expanded(command)):
            what = f"{name} kills torchrun, which does not know the signal, ranks and all"
            how = f"send TERM, or pass --signals-to-handle=SIGTERM,SIG{name} from torch 2.10 on"
            yield command.line, f"{what}: {how}"


def shell_in_between(script: Script) -> Findings:
    """With proctrack/cgroup, Slurm's default, a signal reaches what srun has started, but not its
    children."""
    for command in script.sruns:
        started = command.text.partition("srun")[2]
        texts = script.sources(started, ".sh")
        for shell, text in shell_strings(started):
            # bash itself becomes a single command that has no redirection. dash, which sh often is,
            # does not.
            if shell == "sh" or len(read_bash(text)[1]) > 1 or re.search("[<>]", text):
                texts.append(text)
        for commands in [read_bash(text)[1] for text in texts]:
            trains = [each for each in commands if re.fullmatch(STARTERS, each.name)]
            if trains and not re.match(r"exec\s", trains[-1].text):
                name = trains[-1].name
                why = f"gets Slurm's SIGTERM, and {name} no time to save"
                yield command.line, f"a shell between srun and {name} {why}: exec {name} ..."


# --- main ---

CHECKS = [directives_not_read, time_limit, no_log_folder, lost_log, torchrun_alone, no_srun]
CHECKS += [rank_variables, order_of_tasks, restarts, devices]
CHECKS += [cpus_for_gpus, addresses, exit_status, srun_options, traps, signals, shell_in_between]


def main(arguments: list[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    args = parser.parse_args(arguments)
    status = 0
    for path in args.files:
        try:
            script = Script(Path(path))
        except OSError as error:
            print(f"lint_sbatch.py: cannot read {path!r}: {error.strerror}", file=sys.stderr)
            status = 2
            continue
        checks = CHECKS if script.is_job else []
        findings = {each for check in checks for each in check(script)}
        for line, sentence in sorted(findings):
            print(f"{path}:{line}: {sentence}")
            status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
