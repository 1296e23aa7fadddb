# A new user's path, command by command as the manual shows it, by a user without rights.
# shellcheck shell=bash disable=SC2317,SC2164

# types COMMAND: runs what the user types, in the user's directory.
types() {
    echo "\$ $1"
    (cd "$WORK/user" && as_user env PATH="$PATH" bash -Eeuo pipefail -c "$1")
}

case_a_new_user_finds_the_way() {
    need_user
    mkdir "$WORK/user"
    chown "$TEST_USER:" "$WORK/user"
    types '(umask 077; echo "correct horse battery staple" >passphrase)'
    types 'lockbox create --weak-kdf --kdf-memory 1 --passfile passphrase secrets.lbx'
    types 'mkdir folder && lockbox mount --passfile passphrase secrets.lbx folder'
    types 'echo "meet me at the old mill" >folder/letter.txt && sed -i "s/old mill/bridge/" folder/letter.txt'
    types 'lockbox umount folder && test -z "$(ls -A folder)"'
    # Without a mount.
    types 'mkdir notes && echo one >notes/first && lockbox add --mirror --passfile passphrase secrets.lbx notes'
    types 'lockbox cat --passfile passphrase secrets.lbx letter.txt notes/first | grep -c bridge'
    types 'lockbox export-tar --passfile passphrase secrets.lbx notes | tar --list'
    types 'tar --create notes | lockbox import-tar --passfile passphrase secrets.lbx --to copy'
    # A secret for a script.
    types 'echo "s3cret token" | lockbox env set --passfile passphrase secrets.lbx TOKEN'
    same "$(types 'lockbox run --passfile passphrase secrets.lbx -- sh -c "echo \$TOKEN"' | tail -n 1)" 's3cret token'
    # Another passphrase.
    types '(umask 077; echo "a better one, much longer" >better)'
    types 'lockbox passwd --weak-kdf --kdf-memory 1 --passfile passphrase --new-passfile better secrets.lbx'
    expect 10 'wrong password' types 'lockbox ls --passfile passphrase secrets.lbx'
    types 'lockbox check --full --passfile better secrets.lbx'
    # As after a reboot: nothing but the file is left.
    types 'lockbox mount --passfile better secrets.lbx folder'
    same "$(types 'cat folder/letter.txt folder/copy/notes/first' | tail -n 2)" $'meet me at the bridge\none'
    types 'lockbox umount secrets.lbx'
    ! grep -aq -e mill -e bridge -e token -e notes "$WORK/user/secrets.lbx" || fail 'a word of the content stands in the archive'
}
