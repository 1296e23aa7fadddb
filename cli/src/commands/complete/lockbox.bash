# Completion of lockbox for bash 4.4 or newer. The program itself says what fits, quoted.
_lockbox() {
    COMPREPLY=()
    mapfile -d '' -t COMPREPLY < <(command lockbox complete bash -- "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null </dev/null)
}
complete -o nospace -F _lockbox lockbox
