# Completion of lockbox for fish 3. The program itself says what fits, a line for each.
function __lockbox_complete
    set -l words (commandline -opc)
    set -e words[1]
    set -l current (commandline -ct)
    # Quotes that are not closed yet are no quotes to it.
    set -l plain (string unescape -- $current; or string unescape -- $current\"; or string unescape -- $current\')
    command lockbox complete fish -- $words "$plain" 2>/dev/null </dev/null
end
complete --command lockbox --no-files --arguments '(__lockbox_complete)'
