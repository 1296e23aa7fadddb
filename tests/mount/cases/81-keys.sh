# The keys of an archive: every kind, changes while it is in use, a new volume key, backups of the header.
# shellcheck shell=bash disable=SC2317,SC2164

CHEAP=(--weak-kdf --kdf-memory 1)

# key COMMAND [ARGS...]: with the passphrase of the tests, on $WORK/box.lbx.
key() {
    local command=$1
    shift
    lockbox key "$command" --passfile "$PASSFILE" "$WORK/box.lbx" "$@"
}

# opens OPTIONS...: the slots that these secrets open.
opens() {
    lockbox key test --json "$@" "$WORK/box.lbx" | python3 -c '
import json, sys
print(*(key["slot"] for key in json.load(sys.stdin)["opened"]))'
}

secret() {
    printf '%s\n' "$2" >"$WORK/$1"
    chmod 600 "$WORK/$1"
}

# An age plugin in PATH, a recipient in $WORK/plugin.recipient and its identity in $WORK/plugin.identity.
install_plugin() {
    mkdir -p "$WORK/bin"
    cp "$(command -v age-plugin-lbxtest.py)" "$WORK/bin/age-plugin-lbxtest"
    export PATH="$WORK/bin:$PATH"
    age-plugin-lbxtest new >"$WORK/plugin"
    sed -n 1p "$WORK/plugin" >"$WORK/plugin.recipient"
    sed -n 2p "$WORK/plugin" >"$WORK/plugin.identity"
    chmod 600 "$WORK/plugin.identity"
}

# A native identity, whose recipient is known: made by age-keygen for the tests.
native_identity() {
    secret native.identity AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33
    echo age1t7rxyev2z3rw82stdlrrepyc39nvn86l5078zqkf5uasdy86jp6svpy7pa
}

case_every_kind_of_key_opens_and_survives_a_new_volume_key() {
    new_archive box
    attach box
    echo precious >"$WORK/box/file"
    detach box
    install_plugin
    secret second 'another passphrase'
    secret third 'with the file'
    secret wrong 'with another file'
    ssh-keygen -q -t ed25519 -N '' -f "$WORK/ssh"
    key add --new-passfile "$WORK/second" "${CHEAP[@]}" --label second
    key add --new-keyfile "$WORK/usb" --generate --label 'usb stick'
    same "$(stat -c '%s %a' "$WORK/usb")" '64 600'
    head -c 64 /dev/urandom >"$WORK/half"
    chmod 600 "$WORK/half"
    key add --new-keyfile "$WORK/half" --with-passphrase --new-passfile "$WORK/third" "${CHEAP[@]}" --label both
    key recovery --label drawer >"$WORK/printed"
    grep -oE '[0-9]{6}(-[0-9]{6}){8}' "$WORK/printed" >"$WORK/code"
    chmod 600 "$WORK/code"
    key add --recipient "$(native_identity)" --label native >/dev/null 2>"$WORK/stderr"
    same "$(cat "$WORK/stderr")" ''
    key add --recipient-file "$WORK/ssh.pub" --label ssh 2>"$WORK/stderr"
    grep -q 'can tell that it opens' "$WORK/stderr"
    key add --recipient "$(cat "$WORK/plugin.recipient")" --label plugin 2>"$WORK/stderr"
    grep -q 'can tell that it opens' "$WORK/stderr"

    local try=opens
    check_ways() {
        same "$($try --passfile "$PASSFILE")" 0
        same "$($try --passfile "$WORK/second")" 1
        same "$($try --keyfile "$WORK/usb")" 2
        same "$($try --keyfile "$WORK/half" --passfile "$WORK/third")" 3
        same "$($try --passfile "$WORK/code")" 4
        same "$($try --identity "$WORK/native.identity")" 5
        same "$($try --identity "$WORK/ssh")" 6
        same "$($try --identity "$WORK/plugin.identity")" 7
        same "$($try --keyfile "$WORK/usb" --identity "$WORK/ssh")" '2 6'
    }
    check_ways
    expect 10 'wrong passphrase or key \(it opens with: .*recovery code' \
        lockbox key test --keyfile "$WORK/half" --passfile "$WORK/wrong" "$WORK/box.lbx"
    key ls --json | python3 -c '
import json, sys
keys = [json.loads(line) for line in sys.stdin]
assert [key["slot"] for key in keys] == list(range(8)), keys
assert [key["label"] for key in keys] == ["", "second", "usb stick", "both", "drawer", "native", "ssh", "plugin"], keys
assert [key["kind"] for key in keys] == ["passphrase", "passphrase", "key file", "key file and passphrase", "recovery code"] + ["age recipient", "SSH key", "age recipient"]
assert all(key["created"].endswith("Z") for key in keys) and keys[5]["recipient"].startswith("age1t7rx")'
    for word in 'usb stick' drawer native; do
        ! grep -aq "$word" "$WORK/box.lbx" || fail "the label $word is readable"
    done

    # The new key is wrapped to all that stay with one secret at hand.
    cp "$WORK/box.lbx" "$WORK/before.lbx"
    lockbox key rekey --keyfile "$WORK/usb" "$WORK/box.lbx" --drop second >"$WORK/report"
    grep -q '^dropped  1 passphrase "second"$' "$WORK/report"
    same "$(grep -c '^kept' "$WORK/report")" 7
    expect 10 'wrong passphrase' lockbox key test --passfile "$WORK/second" "$WORK/box.lbx"
    lockbox key test --accept-older --passfile "$WORK/second" "$WORK/before.lbx" >/dev/null
    same "$(opens --passfile "$PASSFILE")" 0
    same "$(opens --keyfile "$WORK/half" --passfile "$WORK/third")" 3
    same "$(opens --passfile "$WORK/code")" 4
    same "$(opens --identity "$WORK/native.identity")" 5
    same "$(opens --identity "$WORK/ssh")" 6
    same "$(opens --identity "$WORK/plugin.identity")" 7
    attach box
    same "$(cat "$WORK/box/file")" precious
    detach box
    check_full box
    # Whoever puts the copy back is told.
    cp "$WORK/before.lbx" "$WORK/box.lbx"
    expect 16 'older copy' lockbox ls --passfile "$PASSFILE" "$WORK/box.lbx"
}

case_keys_are_removed_but_never_the_last_one() {
    new_archive box
    key add --new-keyfile "$WORK/usb" --generate --label stick
    expect 2 'no key slot has the label' key rm nothing
    expect 2 'key slot 9 is empty' key rm 9
    key rm stick >"$WORK/stdout"
    grep -q 'Older copies .* still open .*lockbox key rekey' "$WORK/stdout"
    expect 10 'wrong passphrase' lockbox key test --keyfile "$WORK/usb" "$WORK/box.lbx"
    expect 2 'the last one' key rm 0
    expect 2 'no key slot would remain' key rekey --drop 0
    same "$(opens --passfile "$PASSFILE")" 0
}

case_keys_of_an_archive_in_use_name_the_holder() {
    new_archive box
    head -c 64 /dev/urandom >"$WORK/usb"
    lockbox header backup "$WORK/box.lbx" "$WORK/header"
    attach box
    local pid command
    pid=$(daemon_of "$WORK/box.lbx")
    for command in "add --new-keyfile $WORK/usb" 'rm 0' recovery rekey; do
        # shellcheck disable=SC2086
        expect 13 "process $pid serves it at $WORK/box" key $command
    done
    expect 13 "process $pid" lockbox passwd --passfile "$PASSFILE" --new-passfile "$PASSFILE" "$WORK/box.lbx"
    expect 13 "process $pid" lockbox header restore --passfile "$PASSFILE" "$WORK/box.lbx" "$WORK/header"
    key ls | shows passphrase
    detach box
}

case_a_recovery_code_sets_a_new_passphrase() {
    new_archive box
    key recovery --json >"$WORK/json"
    python3 -c 'import json, sys; print(json.load(sys.stdin)["recovery_code"])' <"$WORK/json" >"$WORK/code"
    chmod 600 "$WORK/code"
    secret new 'not forgotten'
    local code wrong
    code=$(cat "$WORK/code")
    wrong=$(((${code:2:1} + 1) % 10))
    secret typo "${code:0:2}$wrong${code:3}"
    expect 2 'group 1 of the recovery code has a typing error' \
        lockbox recovery "${CHEAP[@]}" --recovery-code "$WORK/typo" --new-passfile "$WORK/new" "$WORK/box.lbx"
    ! grep -q "${code:7:6}" "$WORK/stderr" || fail 'the code is shown'
    secret swapped "${code:7:7}${code:0:7}${code:14}"
    expect 2 'do not match' \
        lockbox recovery "${CHEAP[@]}" --recovery-code "$WORK/swapped" --new-passfile "$WORK/new" "$WORK/box.lbx"
    expect 2 'digits' lockbox recovery "${CHEAP[@]}" --recovery-code "$WORK/new" --new-passfile "$WORK/new" "$WORK/box.lbx"
    create "$WORK/other.lbx"
    expect 10 'wrong passphrase or key' \
        lockbox recovery "${CHEAP[@]}" --recovery-code "$WORK/code" --new-passfile "$WORK/new" "$WORK/other.lbx"
    # As people type it.
    printf '%s\n%s\n' "$(tr '0-' 'O ' <"$WORK/code")" 'not forgotten' | lockbox recovery "${CHEAP[@]}" "$WORK/box.lbx"
    same "$(opens --passfile "$WORK/new")" 0
    expect 10 'wrong passphrase' lockbox key test --passfile "$PASSFILE" "$WORK/box.lbx"
}

# Whose passphrase a recovery replaces is never a guess.
case_a_recovery_replaces_nobodys_passphrase_unasked() {
    local recover=(lockbox recovery "${CHEAP[@]}" --recovery-code "$WORK/code" --new-passfile "$WORK/new" "$WORK/box.lbx")
    new_archive box
    secret partner 'of somebody else'
    secret new 'not forgotten'
    key recovery | grep -oE '[0-9]{6}(-[0-9]{6}){8}' >"$WORK/code"
    chmod 600 "$WORK/code"
    key add --new-passfile "$WORK/partner" "${CHEAP[@]}" --label partner
    cp "$WORK/box.lbx" "$WORK/before.lbx"
    expect 2 'name with --slot .*\(0 passphrase, 2 passphrase "partner"\)' "${recover[@]}"
    expect 2 'no key slot has the label' "${recover[@]}" --slot nobody
    expect 2 'no passphrase that could be changed: it is a recovery code' "${recover[@]}" --slot 1
    same_file "$WORK/box.lbx" "$WORK/before.lbx"
    key rm 0 >/dev/null
    # One is left, and its label says that it is somebody's.
    expect 2 'name with --slot .*\(2 passphrase "partner"\)' "${recover[@]}"
    same "$(opens --passfile "$WORK/partner")" 2
    "${recover[@]}" --slot partner | shows '^Key slot 2 passphrase "partner" has the new passphrase'
    same "$(opens --passfile "$WORK/new")" 2
    expect 10 'wrong passphrase' lockbox key test --passfile "$WORK/partner" "$WORK/box.lbx"
}

case_a_new_passphrase_takes_the_place_of_the_old_one_in_every_slot() {
    new_archive box
    secret new 'another one'
    key add --new-passfile "$PASSFILE" "${CHEAP[@]}" --label again
    same "$(opens --passfile "$PASSFILE")" '0 1'
    lockbox passwd "${CHEAP[@]}" --passfile "$PASSFILE" --new-passfile "$WORK/new" "$WORK/box.lbx" >"$WORK/stdout"
    grep -q 'is changed in key slots 0 and 1, which all had the old one' "$WORK/stdout"
    expect 10 'wrong passphrase' lockbox key test --passfile "$PASSFILE" "$WORK/box.lbx"
    same "$(opens --passfile "$WORK/new")" '0 1'
}

case_wrong_and_hostile_input_of_every_kind_is_one_sentence() {
    new_archive box
    install_plugin
    cp "$WORK/box.lbx" "$WORK/before.lbx"
    head -c 31 /dev/urandom >"$WORK/short"
    expect 2 'may be read by others' key add --new-keyfile "$WORK/short"
    head -c 100 /dev/zero >"$WORK/zeros"
    chmod 600 "$WORK/short" "$WORK/zeros"
    expect 2 'too short: bytes=31 least=32' key add --new-keyfile "$WORK/short"
    expect 2 'one byte repeated' key add --new-keyfile "$WORK/zeros"
    expect 2 'too large' key add --new-keyfile /dev/urandom
    expect 2 'is a directory' key add --new-keyfile "$WORK"
    expect 2 'No such file' key add --new-keyfile "$WORK/nothing"
    expect 2 'short already exists and was not changed: without --generate the existing file is added' key add --new-keyfile "$WORK/short" --generate
    expect 2 'begins with age1' key add --recipient hello
    expect 2 'is secret' key add --recipient AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33
    ! grep -q GQ9778 "$WORK/stderr" || fail 'a secret is shown'
    expect 2 'malformed' key add --recipient 'ssh-ed25519 AAAA'
    expect 2 'a label must not be a number' key add --recipient "$(native_identity)" --label 7
    # Plugins that are missing, fail, die or talk nonsense.
    local recipient
    recipient=$(cat "$WORK/plugin.recipient")
    mv "$WORK/bin/age-plugin-lbxtest" "$WORK/away"
    expect 2 'age-plugin-lbxtest is not installed' key add --recipient "$recipient"
    mv "$WORK/away" "$WORK/bin/age-plugin-lbxtest"
    LBXTEST_MODE=error expect 2 'the token .*is locked' key add --recipient "$recipient"
    ! grep -q $'\x1b' "$WORK/stderr" || fail 'a plugin reaches the terminal'
    LBXTEST_MODE=die expect 2 'plugin' key add --recipient "$recipient"
    LBXTEST_MODE=garbage expect 2 'plugin' key add --recipient "$recipient"
    same_file "$WORK/box.lbx" "$WORK/before.lbx"

    key add --recipient "$recipient" --label token >/dev/null 2>&1
    LBXTEST_MODE=error expect 2 'the token .*is locked' \
        lockbox key test --identity "$WORK/plugin.identity" "$WORK/box.lbx"
    LBXTEST_MODE=die expect 2 'plugin' lockbox key test --identity "$WORK/plugin.identity" "$WORK/box.lbx"
    LBXTEST_MODE=wrong expect 2 'does not decrypt' lockbox key test --identity "$WORK/plugin.identity" "$WORK/box.lbx"
    # What fails does not keep another secret from opening.
    same "$(LBXTEST_MODE=error opens --identity "$WORK/plugin.identity" --passfile "$PASSFILE")" 0
    # A slot whose plugin is gone keeps a new volume key from being made, until it is dropped.
    cp "$WORK/box.lbx" "$WORK/before.lbx"
    LBXTEST_MODE=die expect 2 'key slot 1 cannot be preserved: .*--drop 1' key rekey
    same_file "$WORK/box.lbx" "$WORK/before.lbx"
    LBXTEST_MODE=die key rekey --drop token >/dev/null

    printf 'AGE-SECRET-KEY-1MALFORMED\n' >"$WORK/identity"
    chmod 600 "$WORK/identity"
    expect 2 'not an age identity' lockbox key test --identity "$WORK/identity" "$WORK/box.lbx"
    ! grep -q MALFORMED "$WORK/stderr" || fail 'a secret is shown'
    ssh-keygen -q -t ed25519 -N 'protected' -f "$WORK/ssh"
    expect 2 'passphrase of the SSH key' setsid lockbox key test --identity "$WORK/ssh" "$WORK/box.lbx"
    chmod 644 "$WORK/identity"
    expect 2 'may be read by others' lockbox key test --identity "$WORK/identity" "$WORK/box.lbx"
}

case_a_header_backup_saves_an_archive_without_header() {
    new_archive box
    create "$WORK/other.lbx"
    lockbox header backup "$WORK/box.lbx" "$WORK/header"
    lockbox header backup "$WORK/other.lbx" "$WORK/header.other"
    same "$(stat -c '%s %a' "$WORK/header")" '135168 600'
    expect 2 'header already exists and was not changed: choose another name' lockbox header backup "$WORK/box.lbx" "$WORK/header"
    restore() {
        lockbox header restore --passfile "$PASSFILE" "$WORK/box.lbx" "$@"
    }
    expect 2 'another archive' restore "$WORK/header.other"
    expect 2 'bytes instead of' restore "$PASSFILE"
    # Both copies gone, as a wrong dd leaves it.
    dd if=/dev/urandom of="$WORK/box.lbx" bs=4096 count=33 conv=notrunc status=none
    dd if=/dev/urandom of="$WORK/box.lbx" bs=4096 count=33 seek=320 conv=notrunc status=none
    expect 11 'not a lockbox archive' lockbox ls --passfile "$PASSFILE" "$WORK/box.lbx"
    expect '2|12' 'another archive' restore "$WORK/header.other"
    secret wrong 'no passphrase of it'
    expect 10 'wrong passphrase' lockbox header restore --passfile "$WORK/wrong" "$WORK/box.lbx" "$WORK/header"
    restore "$WORK/header"
    check_full box
    # Keys removed since are not revived unasked.
    key add --new-keyfile "$WORK/usb" --generate
    lockbox header backup "$WORK/box.lbx" "$WORK/header.with"
    key rm 1 >/dev/null
    expect 16 'older than .*accept-older' restore "$WORK/header.with"
    restore --accept-older "$WORK/header.with" | shows 'open the archive again'
    same "$(opens --keyfile "$WORK/usb")" 1
    check_full box
    printf x | dd of="$WORK/header" bs=1 seek=9000 conv=notrunc status=none
    expect 2 'it is damaged' restore "$WORK/header"
}

# Also of slots that other programs wrote, hostile ones among them.
case_the_independent_reader_opens_key_files_and_recovery_codes() {
    local python=${READER_PYTHON:-}
    if [[ -z $python ]]; then
        note 'skipped: READER_PYTHON is set by tests/run.sh'
        return 0
    fi
    new_archive box
    attach box
    echo precious >"$WORK/box/file"
    detach box
    key add --new-keyfile "$WORK/usb" --generate
    key recovery --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["recovery_code"])' >"$WORK/code"
    for _ in 1 2; do
        "$python" "$READER" --keyfile "$WORK/usb" ls "$WORK/box.lbx" | shows file
        "$python" "$READER" --recovery-code "$WORK/code" ls "$WORK/box.lbx" | shows file
        "$python" "$READER" --passfile "$PASSFILE" ls "$WORK/box.lbx" | shows file
        key rekey >/dev/null
    done
}
