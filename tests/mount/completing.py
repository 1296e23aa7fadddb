#!/usr/bin/env python3
"""Types lines into an interactive shell on a terminal of its own, presses TAB behind each, and prints what stands on the line then.

    completing.py bash|zsh|fish LINE...

The shell has what `lockbox completions` prints, and nothing else of its user's. A LINE may hold further TABs. Ends with 99 when the shell does
not answer.
"""

import os
import pty
import select
import subprocess
import sys
import tempfile
import time

DEADLINE = 120
SHOW = b"\x18\x10"  # Ctrl-X Ctrl-P
EMPTY = b"\x15"  # Ctrl-U


def setup(shell, place, line):
    """Writes what the shell reads first; answers how it is started."""
    script = subprocess.run(["lockbox", "completions", shell], check=True, stdout=subprocess.PIPE, text=True).stdout
    environment = dict(os.environ, TERM="xterm", LINE=line)

    def write(path, text):
        path = os.path.join(place, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    # A name that appears at once, with all of it.
    save = """printf '%s' "$BUFFER" >"$LINE.new"; mv "$LINE.new" "$LINE" """
    if shell == "bash":
        write("lockbox", script)
        rc = write("rc", f"""
PS1='READY> '
bind 'set bell-style none'
bind 'set page-completions off'
bind 'set completion-query-items 0'
. {place}/lockbox
show() {{ BUFFER=$READLINE_LINE; {save}; }}
bind -x '"\\C-x\\C-p": show'
""")
        return ["bash", "--noprofile", "--rcfile", rc, "-i"], environment
    if shell == "zsh":
        write("functions/_lockbox", script)
        write(".zshrc", f"""
PS1='READY> '
fpath=({place}/functions $fpath)
autoload -U compinit
compinit -u -D
LISTMAX=0
show() {{ {save} }}
zle -N show
bindkey -e
bindkey '^X^P' show
""")
        return ["zsh", "-i"], dict(environment, ZDOTDIR=place)
    write("fish/completions/lockbox.fish", script)
    write("fish/config.fish", """
function fish_prompt; printf 'READY> '; end
function fish_greeting; end
set -g fish_autosuggestion_enabled 0
bind \\cx\\cp 'commandline | string collect >$LINE.new; mv $LINE.new $LINE'
""")
    # Where they are, fish begins no process that makes them and writes here after the shell has ended.
    os.makedirs(os.path.join(place, "fish", "generated_completions"))
    return ["fish", "-i"], dict(environment, XDG_CONFIG_HOME=place, XDG_DATA_HOME=place)


def main():
    shell, lines = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as place:
        answer = os.path.join(place, "line")
        command, environment = setup(shell, place, answer)
        pid, terminal = pty.fork()
        if pid == 0:
            os.execvpe(command[0], command, environment)
        shown = b""
        deadline = time.time() + DEADLINE

        def listen(seconds):
            nonlocal shown
            if select.select([terminal], [], [], seconds)[0]:
                more = os.read(terminal, 65536)
                shown += more
                if b"\x1b[c" in more or b"\x1b[0c" in more:
                    os.write(terminal, b"\x1b[?62c")

        try:
            while b"READY> " not in shown:
                listen(0.05)
                if time.time() > deadline:
                    raise TimeoutError("no prompt")
            for line in lines:
                os.write(terminal, line.encode() + b"\t" + SHOW)
                deadline = time.time() + DEADLINE
                while not os.path.exists(answer):
                    listen(0.02)
                    if time.time() > deadline:
                        raise TimeoutError(line)
                with open(answer, encoding="utf-8", errors="surrogateescape") as file:
                    print(file.read().rstrip("\n"))
                os.remove(answer)
                os.write(terminal, EMPTY)
        except (OSError, TimeoutError) as error:
            print(f"{shell}: {error!r}: {shown!r}")
            sys.exit(99)
        finally:
            os.close(terminal)
            os.waitpid(pid, 0)


main()
