#!/usr/bin/env bash
# Tells stories: types their commands, shows them, and compares exit codes and everything that is printed.
#
#   tests/story/tell.sh STORY...     as root; lockbox and mount.lockbox in PATH and /sbin, or installed by the first story
#
# A story is text with lines `ann$ COMMAND` (in her home /srv/ann, as the user STORY_USER) and `root# COMMAND`. The lines after a command, up
# to an empty line or another command, are what it prints: patterns of the shell, `...` for any number of lines (also empty ones), and at last
# `[N]` for an exit code other than 0.
set -uo pipefail

home=/srv/ann
user=${STORY_USER:-ann}
uid=$(id -u "$user") || exit 1
seconds_each=${STORY_SECONDS:-120}
output=$(mktemp) || exit 1
trap finish EXIT

# What a story that breaks off leaves running ends with it.
finish() {
    local point
    rm -f "$output"
    awk -v top="$home/" '/ - fuse\.lockbox / && index($5, top) == 1 { print $5 }' /proc/self/mountinfo | while read -r point; do
        umount -i -l "$point"
    done
    [[ ! -s $home/server ]] || kill "$(cat "$home/server")" 2>/dev/null
}

mkdir -p "$home" "/run/user/$uid"
chown "$user:" "$home" "/run/user/$uid"
chmod 700 "/run/user/$uid"

# types WHO COMMAND: everything that it prints goes to $output.
types() {
    local become=(env -i) at_home=/root
    if [[ $1 == ann ]]; then
        become=(setpriv --reuid "$user" --regid "$user" --init-groups --inh-caps=-all env -i "XDG_RUNTIME_DIR=/run/user/$uid")
        at_home=$home
    fi
    # Without a terminal, which would be asked.
    (cd "$home" && exec setsid --wait timeout "$seconds_each" "${become[@]}" "HOME=$at_home" "PATH=$PATH" LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        bash -c "$2") >"$output" 2>&1 </dev/null
}

# as_expected LINE...: whether $output is what the lines say.
as_expected() {
    local line pattern skips=0 rest=("$@")
    while IFS= read -r line || [[ -n $line ]]; do
        while [[ ${rest[0]-} == ... ]]; do
            skips=1
            rest=("${rest[@]:1}")
        done
        pattern=${rest[0]-}
        # shellcheck disable=SC2053 # a pattern
        if [[ ${#rest[@]} -gt 0 && $line == $pattern ]]; then
            rest=("${rest[@]:1}")
            skips=0
        elif [[ $skips -eq 0 ]]; then
            return 1
        fi
    done <"$output"
    [[ ${rest[0]-} != ... ]] || rest=("${rest[@]:1}")
    [[ ${#rest[@]} -eq 0 ]]
}

commands=0
who=
command=
expected=()

# Runs the command that was read, with what it should print.
settle() {
    [[ -n $who ]] || return 0
    local wanted=0 code=0
    if [[ ${#expected[@]} -gt 0 && ${expected[-1]} =~ ^\[([0-9]+)\]$ ]]; then
        wanted=${BASH_REMATCH[1]}
        unset 'expected[-1]'
    fi
    types "$who" "$command" || code=$?
    cat "$output"
    commands=$((commands + 1))
    if [[ $code -ne $wanted ]]; then
        echo "exit code $code, and the story has $wanted"
        exit 1
    fi
    if ! as_expected "${expected[@]}"; then
        echo 'the story has:'
        printf '%s\n' "${expected[@]}"
        exit 1
    fi
    who=
    expected=()
}

for story in "$@"; do
    while IFS= read -r line || [[ -n $line ]]; do
        if [[ $line =~ ^(ann\$|root#)\ (.*) ]]; then
            settle
            who=${line%%[\$#]*}
            command=${line#*[\$#] }
            echo "$line"
        elif [[ -n $line && -n $who ]]; then
            expected+=("$line")
        else
            settle
            echo "$line"
        fi
    done <"$story"
    settle
done
echo "told $# stories with $commands commands"
[[ $commands -gt 0 ]]
