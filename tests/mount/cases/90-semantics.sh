# What programs may rely on beyond single operations.
# shellcheck shell=bash disable=SC2317,SC2164

case_access_control_lists_are_refused_and_the_umask_holds() {
    new_archive box
    attach box
    mkdir "$WORK/box/directory"
    expect 1 'not supported' setfacl -m u:65534:rwx "$WORK/box/directory"
    expect 1 'not supported' setfacl -d -m u:65534:rwx "$WORK/box/directory"
    (umask 027 && mkdir "$WORK/box/directory/below" && echo x >"$WORK/box/directory/file")
    same "$(stat -c %a "$WORK/box/directory/below")" 750
    same "$(stat -c %a "$WORK/box/directory/file")" 640
}
