#compdef lockbox
# Completion of lockbox for zsh. The program itself says what fits: the word, what of it is shown, what follows it, and what it is about.
_lockbox() {
    local -a told words_with words_without shown_with shown_without
    local word shown space about
    # A tilde is one only as long as nobody quotes it.
    local home=
    if [[ $PREFIX == '~/'* ]]; then
        home='~/'
    fi
    told=("${(@0)$(command lockbox complete zsh -- "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null </dev/null)}")
    [[ -z $home ]] || compset -p 2
    for word shown space about in "${(@)told}"; do
        [[ -n $word ]] || continue
        [[ -z $about ]] || shown+="  -- $about"
        if [[ -n $space ]]; then
            words_with+=("${word#$home}")
            shown_with+=("$shown")
        else
            words_without+=("${word#$home}")
            shown_without+=("$shown")
        fi
    done
    local found=1
    (($#words_with)) && compadd -d shown_with -a words_with && found=0
    (($#words_without)) && compadd -S '' -d shown_without -a words_without && found=0
    return found
}
if [[ $funcstack[1] == _lockbox ]]; then
    _lockbox "$@"
else
    compdef _lockbox lockbox
fi
