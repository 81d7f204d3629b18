#!/usr/bin/env python3
"""Find the mistakes in job scripts that cost a night: python aux/lint_sbatch.py my_job.sh

It prints a line for each finding, `FILE:LINE: what is wrong, why: what to do`, and ends with status
1, or prints nothing and ends with 0; 2 means that a file cannot be read. Run it where you type
sbatch, because it also checks that the log's folder exists. It reads commands, quotes, comments and
here-documents as bash does, and runs nothing.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Findings = Iterator[tuple[int, str]]  # line, sentence

# --- reading bash ---


@dataclass(eq=False)  # equal only to itself, because a script may repeat a command
class Command:
    """A simple command: its first line, its text, its text with blanks for what bash does not
    expand, and what ends it."""

    line: int
    text: str = ""
    live: str = ""
    end: str = ""

    @property
    def name(self) -> str:
        """The first word that is neither an assignment nor a prefix of a command like `exec`,
        without its folder."""
        prefix = r"[!{]|if|then|elif|else|while|until|do|time|exec|nohup|timeout( -\S+)* \S+"
        lead = rf"(?:(?:{prefix})\s+)*"
        value = r"""(?:"(?:\\.|[^"])*"|'[^']*'|\\.|[^\s"'])*"""
        first = re.match(rf"\s*{lead}(?:\w+={value}\s+)*{lead}(\S*)", self.text)[3]
        return first.rpartition("/")[2]

    @property
    def code(self) -> str:
        """The text without its prose: strings of several words that are neither values nor run by
        a shell."""
        if re.search(r"\s-\w*c\s", self.text):
            return self.text
        sentence = re.compile(r"(?!.*\$\().*\s.*", re.S)
        strings = r"""(?<![\w=])"((?:\\.|[^"\\])*)\"|"(?:\\.|[^"\\])*\""""

        def without_prose(found: re.Match) -> str:
            return '""' if sentence.fullmatch(found[1] or "") else found[0]

        return re.sub(strings, without_prose, self.text)


def read_bash(text: str) -> tuple[list[Command], dict[int, str]]:
    """The commands of a script, and its comments by line. Here-documents are left out."""
    commands, comments, here_documents = [], {}, []
    command, i, line = Command(1), 0, 1
    # The closing characters of all that is open, the innermost last
    nested = []
    token = re.compile(r"<<(-?)\s*(['\"\\]?)(\w+)\2|<<<|>&|<&|&>|&&|\|\||\|&|;;|[;|&()\n]")
    while i < len(text):
        piece, ends, live, quoted = text[i], False, True, nested[-1:] == ['"']
        found = token.match(text, i)
        if text[i : i + 2] == "\\\n":  # the command continues on the next line
            i, line, piece = i + 1, line + 1, " "
        elif piece == "\\":
            piece, live = text[i : i + 2], False
        elif piece == "'" and not quoted:
            piece, live = re.compile(r"'[^']*'?").match(text, i)[0], False
        elif nested and piece == nested[-1]:
            nested.pop()
        elif piece in '"`':
            nested.append(piece)
        elif text[i : i + 2] in ("$(", "${"):
            piece = text[i : i + 2]
            nested.append(")" if piece == "$(" else "}")
        elif (
            piece == "#" and (i == 0 or text[i - 1] in " \t\n;&|()") and nested[-1:] in ([], [")"])
        ):
            comments[line] = re.compile(r".*").match(text, i)[0]
            i += len(comments[line])
            continue
        elif found and not quoted:
            piece = found[0]
            if found[3]:
                here_documents += [] if "((" in command.text else [found]
            elif piece == "(" and (nested or text[i - 1 : i] == "=" or text[i + 1 : i + 2] == "("):
                # An array, arithmetic, or parentheses inside one, not commands.
                nested.append(")")
            else:
                ends = not nested and piece not in ("<<<", ">&", "<&", "&>")
            if piece == "\n":
                for start in here_documents:
                    tabs = "\t*" if start[1] else ""
                    last = re.compile(rf"^{tabs}{start[3]}$\n?", re.M).search(text, i + 1)
                    piece = text[i : last.end() - 1 if last else len(text)]
                    i, line, piece = i + len(piece) - 1, line + piece.count("\n") - 1, "\n"
                here_documents = []
        if not command.text.strip():
            command.line = line
        if ends:
            command.end = piece
            commands += [command] if command.text.strip() else []
            command = Command(line)
        else:
            command.text += piece
            command.live += piece if live else " " * len(piece)
        i, line = i + len(text[i : i + 1] if piece in " \n" else piece), line + piece.count("\n")
    return [*commands, command] if command.text.strip() else commands, comments


# --- what the script says ---

SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-G": "gpus", "-o": "output"}
SHORT |= {"-e": "error", "-J": "job-name", "-D": "chdir", "-K": "kill-on-bad-exit"}
# Their arguments may mention commands, but are not run.
SPEAK = r"echo|printf|die|cat|logger|grep|sed|which|type|trap|pkill|pgrep"
TORCHRUN = r"(?<![\w.])(?:torchrun|torch\.distributed\.(?:run|launch))(?![\w./-])"
ALONE = re.compile(r"--standalone|--nnodes[ =]+1(?![\w:.])")
PROGRAMS = r"(?<![\w=.:-])(?:python3?|accelerate|deepspeed|apptainer|singularity|bash)\b"
TRAINS = rf"{TORCHRUN}|{PROGRAMS}|\.(?:py|sh)\b|\$@"
# They prepare a training run, or show something.
ASIDE = r"hostname|nvidia-smi|date|lscpu|free|df|ls|mkdir|cp|rsync|rm|tar"
ASIDE_IN_SHELL = rf"{ASIDE}|mv|ln|chmod|touch|unzip|gunzip|find|cd|export|set|echo|sleep|:|true"


def first_number(text: str | None) -> int:
    found = re.search(r"\d+", text or "")
    return int(found[0]) if found else 0


def options(text: str) -> dict[str, str]:
    """Slurm's options in `text` by their long names; one without a value has an empty one."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    found = {}
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        value = "" if following.startswith("-") else following
        if match := re.fullmatch(r"--([a-z][a-z-]+)(?:=(.*))?", word, re.S):
            found[match[1]] = value if match[2] is None else match[2]
        elif word[:2] in SHORT:
            found[SHORT[word[:2]]] = word[2:] or value
    return found


def shell_strings(text: str) -> list[str]:
    """The strings that a shell in `text` runs: of `bash -c 'cd a && ls'` the one `cd a && ls`."""
    strings = re.finditer(r"sh\s+(?:-\w+\s+)*-\w*c\s+(['\"])(.*?)\1", text, re.S)
    return [found[2] for found in strings]


def only_prepares(command: Command) -> bool:
    """Whether it is an srun of a shell that trains nothing: srun bash -c 'mkdir a && cp b a'."""
    strings = shell_strings(command.text.partition("srun")[2])
    inner = [each for text in strings for each in read_bash(text)[0]]
    return bool(inner) and all(re.fullmatch(ASIDE_IN_SHELL, each.name) for each in inner)


class Script:
    """A job script taken apart: what its directives ask for, its commands, the values of its
    variables."""

    def __init__(self, path: Path):
        self.path = path
        self.text = path.read_bytes().decode(errors="replace").replace("\r\n", "\n")
        self.commands, comments = read_bash(self.text)
        lines = enumerate(self.text.split("\n"), 1)
        self.comments = [(i, line) for i, line in lines if i in comments]
        self.directives = [(i, line) for i, line in self.comments if line.startswith("#SBATCH")]
        # Slurm reads directives only up to there.
        self.end = self.commands[0].line if self.commands else sys.maxsize
        self.asked, self.asked_at = {}, {}
        for line, text in self.directives:
            found = options(text.removeprefix("#SBATCH")) if line < self.end else {}
            self.asked |= found
            self.asked_at |= dict.fromkeys(found, line)
        names = [name for name in ("gpus-per-node", "gres", "gpus") if name in self.asked]
        gpus = self.asked[names[0]] if names else ""
        self.gpus = first_number(gpus.rpartition(":")[2])
        self.nodes = first_number(self.asked.get("nodes"))
        self.body = [command for command in self.commands if not re.fullmatch(SPEAK, command.name)]
        self.sruns = [
            command for command in self.body if re.search(r"(?<![\w.=\"'-])srun\s", command.code)
        ]
        self.values: dict[str, str] = {}
        value = r"(\"(?:\\.|[^\"])*\"|'[^']*'|\([^()]*\)|\$\([^()]*\)|\S+)"
        for command in self.commands:
            for name, text in re.findall(rf"(?<![\w-])(\w+)\+?={value}", command.text):
                more = re.sub(rf"\$\{{?{name}\b", "", text.strip("\"'()"))  # X="$X --more"
                self.values[name] = f"{self.values.get(name, '')} {more}"

    def expanded(self, command: Command) -> str:
        """The command with the values of the variables that the script itself sets."""
        text = command.code
        for _ in range(3):
            text = re.sub(
                r"\$\{?(\w+)(?:\[[@*]\])?\}?",
                lambda match: self.values.get(match[1], match[0]),
                text,
            )
        return text

    def trainings(self) -> list[Command]:
        starters = [c for c in self.body if re.fullmatch(r'srun|torchrun|python3?|"\$@"', c.name)]
        return [command for command in starters if re.search(TRAINS, self.expanded(command))]

    def sources(self, text: str, suffix: str) -> list[str]:
        """The contents of the files that `text` names, from here or from the script's folder."""
        names = re.findall(rf"[\w./-]+{re.escape(suffix)}\b", text)
        files = {Path(folder, name) for name in names for folder in (".", self.path.parent)}
        return [file.read_text(errors="replace") for file in files if file.is_file()]

    def has_pipefail(self, line: int) -> bool:
        return any(
            re.match(r"\s*set\s.*\bpipefail", command.text)
            for command in self.commands
            if command.line <= line
        )


# --- mistakes ---


def directives_not_read(script: Script) -> Findings:
    for line, text in script.comments:
        if re.match(r"(\s*#\s+SBATCH|\s+#SBATCH|#sbatch)\s+-", text):
            yield (
                line,
                "a comment and no directive, Slurm reads lines that begin with #SBATCH: take out "
                "the blanks",
            )
    for line, text in script.directives:
        if line > script.end:
            yield (
                line,
                "a directive after the first command, where Slurm has stopped reading: move it to "
                "the top",
            )
        if "$" in text.split(" #")[0]:
            yield (
                line,
                "a variable in a directive, which Slurm does not expand: %j, %x or %u, or sbatch's "
                "command line",
            )


def no_log_folder(script: Script) -> Findings:
    for option in script.asked.keys() & {"output", "error"}:
        name, line = script.asked[option], script.asked_at[option]
        folder = Path(name).parent
        places = Path(script.asked.get("chdir", ".")), script.path.parent
        if "%" in str(folder):
            yield (
                line,
                f"no folder {folder} for the log before the job runs, and it dies without a word: "
                "only name%j",
            )
        elif not any((place / folder).is_dir() for place in places):
            yield (
                line,
                f"no folder {folder} for the log, and the job dies without a word: mkdir before "
                "sbatch",
            )
        if "%x" in name and "/" in script.asked.get("job-name", ""):
            yield (
                line,
                "%x is the job's name, which has a /, so the log has no folder: take the / out of "
                "--job-name",
            )


def torchrun_alone(script: Script) -> Findings:
    found = []
    for command in script.body:
        text = script.expanded(command)
        srun = options(re.split(TRAINS, text)[0]) if command in script.sruns else {}
        nodes = first_number(srun.get("nodes")) or script.nodes
        if nodes > 1 and re.search(TORCHRUN, text) and (match := ALONE.search(text)):
            found.append((command, match[0], nodes))
    written_here = [item for item in found if ALONE.search(item[0].text)]
    for command, option, nodes in written_here or found:
        how = '--nnodes="$SLURM_JOB_NUM_NODES" and one --rdzv-endpoint for all'
        yield (
            command.line,
            f"{option} on {nodes} nodes, training runs that do not know of each other: {how}",
        )


def no_srun(script: Script) -> Findings:
    """Several tasks or nodes asked for, and nothing that starts a process for each of them."""
    tasks = max(script.nodes, 1) * max(first_number(script.asked.get("ntasks-per-node")), 1)
    tasks = first_number(script.asked.get("ntasks")) or tasks
    started = r"\b(srun|mpirun|mpiexec|ibrun|jsrun|aprun|prun|ssh|pdsh|clush|parallel)\b(?![.=-])"
    aside = rf"srun(\s+-\S+)*\s+({ASIDE}|env)\b"
    for command in script.body:
        if only_prepares(command):
            continue
        if re.search(started, re.sub(aside, "", script.expanded(command))):
            return
    found = []
    for command in script.body:
        text = script.expanded(command)
        if not re.fullmatch(
            r"python[\d.]*|torchrun|accelerate|apptainer|singularity", command.name
        ):
            continue
        if command.end == "&" or not re.search(r"\.py\b|\s-m\s*(?!pip|venv)\w|\$", text):
            continue  # several of them side by side are also tasks
        name = command.name
        # It starts a process for each GPU, on its own node.
        if re.search(rf"{TORCHRUN}|\baccelerate\b", text):
            if script.nodes > 1 and not ALONE.search(text):
                why = f"so it runs on only one of {script.nodes} nodes"
                found.append(
                    (command, f"{name} without srun, {why}: srun --ntasks-per-node=1 {name} ...")
                )
        elif tasks > 1:
            asked = f"{tasks} {'tasks' if tasks > script.nodes else 'nodes'}"
            why = f"so one process starts, though the header asks for {asked}"
            found.append((command, f"{name} without srun, {why}: srun {name} ..."))
    found = [item for item in found if re.search(r"train|torch|main", item[0].text)] or found[-1:]
    for command, sentence in found[:1]:
        yield command.line, sentence


def rank_variables(script: Script) -> Findings:
    for command in script.body if script.directives or script.sruns else []:
        if found := re.search(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))", command.live):
            how = "read it inside srun, in a script or in srun bash -c '...' with single quotes"
            yield (
                command.line,
                f"{found[1]} expanded in the batch shell, where it is always 0: {how}",
            )


def devices(script: Script) -> Findings:
    gres = re.split("[,:]", script.asked.get("gres", ""))
    if "gpus-per-node" in script.asked and "gpu" in gres:
        line = script.asked_at["gres"]
        yield line, "--gres=gpu beside --gpus-per-node, which Slurm 26.05 refuses: one of the two"
    for command in script.body:
        if re.search(r"\bCUDA_VISIBLE_DEVICES=[\"']?\d", command.text):
            yield (
                command.line,
                "CUDA_VISIBLE_DEVICES hard-coded, but Slurm has chosen this job's GPUs: remove it",
            )
    asked = [(script.asked_at.get("gpus-per-task", 0), script.asked)]
    asked += [(command.line, options(script.expanded(command))) for command in script.sruns]
    sources = [script.text, *script.sources(script.text, ".py")]
    if any(re.search(r"(?i)set_device\([^)\n]*local_?(rank|id)", source) for source in sources):
        for line in (line for line, given in asked if given.get("gpus-per-task") == "1"):
            why = (
                "each rank sees one GPU, number 0, and the second one dies of an invalid device "
                "ordinal"
            )
            yield line, f"--gpus-per-task=1 and set_device(local_rank), {why}: --gpus-per-node"


def addresses(script: Script) -> Findings:
    port = (
        r"(?:MASTER_PORT=[\"']?(?:\$\{\w+:-)?|--(?:master|main_process)[-_]port[ "
        r"=]|--rdzv[-_]endpoint[ =]\S+:)(\d+)"
    )
    for command in script.body:
        if found := re.search(port, command.text):
            how = "MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))"
            yield (
                command.line,
                f"port {found[1]} hard-coded, and two jobs on a node disturb each other: {how}",
            )
        text = script.expanded(command)
        address = re.search(
            r"(?:MASTER_ADDR=|--(?:master[-_]addr|rdzv[-_]endpoint)[ =])(.*)", text, re.S
        )
        text = address[1] if address else ""
        found = re.search(
            r"/etc/hosts|hostname +(-[iI]\b|--ip-address)|SLURM_LAUNCH_NODE_IPADDR", text
        )
        found = found or (script.nodes > 1 and re.match(r"\W*(localhost|127\.\d+\.\d+\.\d+)", text))
        if found:
            how = 'the first line of scontrol show hostnames "$SLURM_JOB_NODELIST"'
            yield (
                command.line,
                f"the address is from {found[0].strip()}, which other nodes may not reach: {how}",
            )


def pipes(script: Script) -> Findings:
    for command in script.body:
        safe = script.has_pipefail(command.line)
        if safe and re.search(r"scontrol show hostnames?\b[^|()]*\|\s*head\b", command.text):
            how = "hosts=$(scontrol ...), then ${hosts%%$'\\n'*}"
            yield (
                command.line,
                "scontrol into head under pipefail, where SIGPIPE ends a job with a long list: "
                f"{how}",
            )
        runs = command in script.sruns or re.search(
            rf"{TORCHRUN}|\bpython3? (-u )?\S+\.py\b", command.text
        )
        trains = runs and re.search(TRAINS, script.expanded(command))
        if trains and command.end in ("|", "|&") and not safe and "PIPESTATUS" not in script.text:
            yield (
                command.line,
                "a pipe hides the exit status, and a failed job ends as COMPLETED: set -o pipefail",
            )


def exit_status_masked(script: Script) -> Findings:
    strict = re.search(
        r"^#!.*\s-\w*e|^\s*set\s+(-\w*e|.*\berrexit)|\$\?|^\s*[\w-]+ *\(\)", script.text, re.M
    )
    for command in script.trainings()[-1:]:  # not if it has functions: one may be called last
        after = script.commands[script.commands.index(command) + 1 :]
        after = [c for c in after if not re.match(r"\s*(fi|done|esac|[})]|exit\s*$)", c.text)]
        why = "and a failed job ends as COMPLETED"
        if command.end == "||" and after and re.match(r"\s*(true|:|echo)\b", after[0].text):
            yield (
                command.line,
                f"|| {after[0].name} takes the place of {command.name}'s status, {why}: leave it "
                "out",
            )
        elif command.end in ("\n", ";") and after and not strict:
            yield (
                command.line,
                f"the status is {after[-1].name}'s, not {command.name}'s, {why}: set -e at the top",
            )


def srun_options(script: Script) -> Findings:
    for command in script.sruns:
        if only_prepares(command):
            continue
        line, environment = re.split(TRAINS, script.expanded(command)), " ".join(script.values)
        # The options may be set in another file.
        if len(line) == 1 or re.search(r"\$\{?\w*(srun|opt|arg|flag)\w*", line[0], re.I):
            continue
        given = options(line[0])
        counts = [
            asked.get(name)
            for asked in (script.asked, given)
            for name in ("nodes", "ntasks", "ntasks-per-node")
        ]
        several = given.get("ntasks") != "1" and any(count not in (None, "1") for count in counts)
        if several and "kill-on-bad-exit" not in given and "SLURM_KILL_BAD_EXIT" not in environment:
            yield (
                command.line,
                "srun lets the others wait for a failed rank until the time limit: "
                "--kill-on-bad-exit=1",
            )
        passed = (
            "cpus-per-task" in given
            or "--cpus-per-task" in line[0]
            or "SRUN_CPUS_PER_TASK" in environment
        )
        if "cpus-per-task" in script.asked and not passed:
            why = "Slurm 22.05 and 23.02 do not hand it on, and a rank gets one CPU"
            yield (
                command.line,
                f'srun without --cpus-per-task, {why}: --cpus-per-task="$SLURM_CPUS_PER_TASK"',
            )


def signals(script: Script) -> Findings:
    asked = re.fullmatch(r"(?:([RB]*):)?(?:SIG)?(\w+)(?:@.*)?", script.asked.get("signal", ""))
    name, heard_here = (asked[2], "B" in (asked[1] or "")) if asked else ("", True)
    trap = re.compile(r"\s*trap\s+(?:--\s+)?(\S.*?)((?:\s+(?:SIG)?[A-Z]+[12]?)+)\s*$", re.S)
    traps = filter(None, [trap.match(command.text) for command in script.commands])
    handled = " ".join(found[2] for found in traps if found[1] not in ("''", '""', "-", ":"))
    training = script.trainings()
    if re.search("USR|TERM" if script.directives else "USR", handled):
        for command in (command for command in training if command.end != "&"):
            why = "bash runs the trap only after the command has ended"
            yield (
                command.line,
                f"{command.name} in the foreground of a shell with a trap, {why}: add & and wait "
                "for it",
            )
        if name and name in handled and not heard_here:
            how = f"let the train script handle it, or say --signal=B:{name}@..."
            yield (
                script.asked_at["signal"],
                f"{name} reaches the ranks, not this shell's trap: {how}",
            )
    waits = any("wait" in command.name for command in script.commands)
    all_in_background = training and all(command.end == "&" for command in training)
    if script.directives and all_in_background and not waits:
        yield (
            training[0].line,
            f"{training[0].name} in the background, and the job ends before it: add wait",
        )
    background = training and training[-1].end == "&"
    once = background and len(re.findall(r"^[^#\n]*\bwait\b", script.text, re.M)) == 1
    # A script that loops or requeues the job may leave the rest to the next start.
    again = re.search(r"^[^#\n]*(\b(while|until|for)\b|requeue)", script.text, re.M)
    if re.search("USR|TERM", handled) and once and not again:
        why = "wait ends when the trap has run, and the job with it, before anything is saved"
        yield (
            training[-1].line,
            f"{training[-1].name} is waited for once, but {why}: wait again until it has ended",
        )
    told = re.search(r"\b(?:kill|scancel)\b.*(?:-|--signal[= ]|-s *)(?:SIG)?USR", script.text)
    ignores = re.compile(r"trap\s+(?:--\s+)?\\?([\"'])\\?\1\s+.*USR")
    for command in script.body if told or (name.startswith("USR") and not heard_here) else []:
        ignored = any(map(ignores.search, [script.text, *script.sources(command.text, ".sh")]))
        if re.search(TORCHRUN, command.code) and not ignored:
            how = "send TERM, which torchrun hands on to its ranks, and handle it there"
            yield (
                command.line,
                f"{name or 'USR1'} kills torchrun, which does not know the signal, ranks and all: "
                f"{how}",
            )


def shell_in_between(script: Script) -> Findings:
    """With proctrack/cgroup, Slurm's default, a signal reaches what srun has started, but not its
    children."""
    for command in script.sruns:
        started = command.text.partition("srun")[2]
        # A single command takes the shell's place.
        inner = [text for text in shell_strings(started) if len(read_bash(text)[0]) > 1]
        for text in [*inner, *script.sources(started, ".sh")]:
            commands = read_bash(text)[0]
            starters = r"torchrun|python[\d.]*|accelerate"
            trains = [command for command in commands if re.fullmatch(starters, command.name)]
            if trains and not re.match(r"\s*exec\s", trains[-1].text):
                name = trains[-1].name
                why = f"gets Slurm's SIGTERM, and {name} no time to save"
                yield command.line, f"a shell between srun and {name} {why}: exec {name} ..."
                break


def counts_typed_twice(script: Script) -> Findings:
    for command in script.body:
        srun = (
            r"|\bsrun(?:\s+-\S+)*?\s+(?:--nodes[ =]|-N ?)(\d+)" if command in script.sruns else ""
        )
        for pattern, asked, instead in (
            (
                r"(?:--nnodes[ =]|\bN(?:UM_)?NODES=)[\"']?(\d+)(?![\d:.])" + srun,
                script.nodes,
                "$SLURM_JOB_NUM_NODES",
            ),
            (
                r"(?:--nproc[-_]per[-_]node[ =]|(?:PROC|GPU)S?_PER_NODE=)[\"']?(\d+)",
                script.gpus,
                "$SLURM_GPUS_ON_NODE",
            ),
            (r"\bWORLD_SIZE=[\"']?(\d+)", script.nodes, "nodes times GPUs, or $SLURM_NTASKS"),
        ):
            found = re.search(pattern, command.text, re.S)
            if asked and found and int(next(filter(None, found.groups()))) > 1:
                text = " ".join(found[0].split())
                yield (
                    command.line,
                    f"{text} repeats the header, and one day only one of the two is changed: "
                    f"{instead}",
                )


# --- main ---

CHECKS = (
    directives_not_read,
    no_log_folder,
    torchrun_alone,
    no_srun,
    rank_variables,
    devices,
    addresses,
    pipes,
)
CHECKS += (exit_status_masked, srun_options, signals, shell_in_between, counts_typed_twice)


def main(paths: list[str]) -> int:
    """Prints the findings. Returns 0 if there are none, 1 if there are any, 2 if a file cannot be
    read."""
    if not paths or paths[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if paths else 2
    status = 0
    for path in paths:
        try:
            script = Script(Path(path))
        except OSError as error:
            print(f"lint_sbatch.py: cannot read {path!r}: {error.strerror}", file=sys.stderr)
            status = 2
            continue
        for line, sentence in sorted({finding for check in CHECKS for finding in check(script)}):
            print(f"{path}:{line}: {sentence}")
            status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
