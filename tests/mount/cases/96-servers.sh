# Archives on a web server (nginx, over TLS), read by the programs.
# shellcheck shell=bash disable=SC2317,SC2164

# make_certificates: an authority that nobody knows but who is told of it, and a server's certificate by it.
make_certificates() {
    (
        cd "$WORK"
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout authority.key -out authority.pem -days 2 \
            -subj '/CN=an authority of the tests'
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout server.key -out server.csr -subj /CN=localhost
        printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n' >extensions
        openssl x509 -req -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 -extfile extensions -out server.pem
    ) 2>"$WORK/openssl.out" || fail "$(cat "$WORK/openssl.out")"
}

# serve [DIRECTIVE]: nginx serves $WORK/www at $URL, and writes a line for each request into $WORK/requests: status, range, bytes sent.
serve() {
    PORT=${PORT:-$(free_port)}
    URL=https://127.0.0.1:$PORT
    mkdir -p "$WORK/www" "$WORK/nginx"
    cat >"$WORK/nginx.conf" <<CONFIG
user root;
worker_processes 1;
daemon off;
# One process: a worker would outlive a master that is killed.
master_process off;
pid $WORK/nginx/pid;
error_log $WORK/nginx/errors;
events { }
http {
    log_format ranges '\$status \$http_range \$body_bytes_sent';
    access_log $WORK/requests ranges;
    client_body_temp_path $WORK/nginx/a;
    proxy_temp_path $WORK/nginx/b;
    fastcgi_temp_path $WORK/nginx/c;
    uwsgi_temp_path $WORK/nginx/d;
    scgi_temp_path $WORK/nginx/e;
    server {
        listen 127.0.0.1:$PORT ssl;
        ssl_certificate $WORK/server.pem;
        ssl_certificate_key $WORK/server.key;
        root $WORK/www;
        ${1-}
    }
}
CONFIG
    in_background /usr/sbin/nginx -c "$WORK/nginx.conf" -e "$WORK/nginx/errors"
    NGINX=$!
    await answers
}

answers() {
    (: >"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null
}

stop_serving() {
    kill -QUIT "$(cat "$WORK/nginx/pid")"
    await gone "$NGINX"
}

requests() {
    wc -l <"$WORK/requests"
}

# all_logged: returns when the server has written a line for each request so far. Its only process
# writes them in order, after the answers; the last request is for a file that does not exist.
all_logged() {
    local before
    missing_files() { grep -c '^404 ' "$WORK/requests" || true; }
    is_logged() { (($(missing_files) > $1)); }
    before=$(missing_files)
    curl --silent --show-error --noproxy '*' --cacert "$WORK/authority.pem" --output /dev/null "$URL/none"
    await is_logged "$before"
}

# publish [BYTES]: an archive with a tree and a large file in $WORK/www, and what went into it in $WORK/src.
publish() {
    make_certificates
    export SSL_CERT_FILE=$WORK/authority.pem XDG_CACHE_HOME=$WORK/cache
    mkdir -p "$WORK/www" "$WORK/src"
    create "$WORK/www/a.lbx"
    cp -r "$(dirname "$0")/cases" "$WORK/src/tree"
    head -c "${1:-30000000}" /dev/urandom >"$WORK/src/large"
    lockbox add --passfile "$PASSFILE" "$WORK/www/a.lbx" "$WORK/src/tree" "$WORK/src/large"
}

# attach_url [OPTIONS]: mounts $URL/a.lbx on $WORK/box.
attach_url() {
    mkdir -p "$WORK/box"
    mount.lockbox "$URL/a.lbx" "$WORK/box" -o "allow-private,passfile=$PASSFILE,log=$WORK/box.log${1:+,$1}"
    mountpoint -q "$WORK/box"
}

# The processes that fetch for a daemon of this case.
fetchers() {
    pgrep --parent "$1" --full -- '--fetcher' || true
}

# sockets_of PID: prints the numbers of its sockets. A descriptor may be closed between the listing and its turn.
sockets_of() {
    { find "/proc/$1/fd" -lname 'socket:*' -printf '%l\n' || true; } | tr -dc '0-9\n'
}

url_daemon() {
    pgrep --full -- "--daemon $URL/a.lbx $WORK/box"
}

case_an_archive_on_a_web_server_is_read_by_every_command_that_reads() {
    local remote=(--passfile "$PASSFILE" --remote allow-private) before asked
    publish
    lockbox snapshot create --passfile "$PASSFILE" "$WORK/www/a.lbx" first
    serve
    same "$(lockbox ls "${remote[@]}" "$URL/a.lbx" | tr '\n' ' ')" 'large tree '
    lockbox cat "${remote[@]}" "$URL/a.lbx" large | cmp - "$WORK/src/large"
    lockbox cat "${remote[@]}" --snapshot first "$URL/a.lbx" large | cmp - "$WORK/src/large"
    mkdir "$WORK/out"
    lockbox extract "${remote[@]}" "$URL/a.lbx" --to "$WORK/out"
    diff -r "$WORK/src" "$WORK/out"
    lockbox info --json "${remote[@]}" "$URL/a.lbx" | shows '"closed":true'
    lockbox check --full "${remote[@]}" "$URL/a.lbx"
    same "$(lockbox snapshot ls --json "${remote[@]}" "$URL/a.lbx" | grep -c first)" 1
    lockbox export-tar "${remote[@]}" "$URL/a.lbx" | tar -x -C "$WORK/out" -f - --one-top-level=tar
    diff -r "$WORK/src" "$WORK/out/tar"
    # A copy of a moment of it.
    lockbox backup "${remote[@]}" --verify "$URL/a.lbx" "$WORK/copy.lbx"
    lockbox cat --passfile "$PASSFILE" "$WORK/copy.lbx" large | cmp - "$WORK/src/large"
    # The opening is one request; the tree of a small archive is a few.
    all_logged
    before=$(requests)
    lockbox ls --passfile "$PASSFILE" --remote allow-private,cache-size=0 "$URL/a.lbx" >/dev/null
    all_logged
    # Without the one of all_logged.
    asked=$(($(requests) - before - 1))
    ((asked <= 4)) || fail "a listing took $asked requests"
    expect 2 'can only be read' lockbox add "${remote[@]}" "$URL/a.lbx" "$WORK/src/tree"
    expect 2 'can only be read' lockbox compact "${remote[@]}" "$URL/a.lbx"
    expect 2 'can only be read' lockbox snapshot create "${remote[@]}" "$URL/a.lbx" second
    expect 10 'wrong passphrase' lockbox ls --passfile <(echo other) --passfile-any --remote allow-private "$URL/a.lbx"
    expect 19 'cannot open .*No such file' lockbox ls "${remote[@]}" "$URL/b.lbx"
    expect 18 'needs allow-private' lockbox ls --passfile "$PASSFILE" "$URL/a.lbx"
    expect 2 'every user of this machine' lockbox ls "${remote[@]}" "https://user:password@127.0.0.1/a.lbx"
    mount.lockbox "$URL/b.lbx" "$WORK/out" -o "nofail,allow-private,passfile=$PASSFILE"
    expect 19 'cannot open .*No such file' mount.lockbox "$URL/b.lbx" "$WORK/out" -o "allow-private,passfile=$PASSFILE"
    echo nothing >"$WORK/www/b.lbx"
    expect 11 'not a lockbox archive' lockbox ls "${remote[@]}" "$URL/b.lbx"
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt expect 18 'certificate is not trusted' lockbox ls "${remote[@]}" "$URL/a.lbx"
}

case_an_archive_on_a_web_server_is_mounted_and_its_daemon_reaches_no_network() {
    local pid fetcher sockets before
    publish
    serve
    attach_url
    diff -r "$WORK/src" "$WORK/box"
    grep -q "^$URL/a.lbx $WORK/box fuse.lockbox ro," /proc/self/mounts
    # Beside a mount of the file that the server has: each has its own daemon, and is found.
    mkdir "$WORK/local"
    mount.lockbox "$WORK/www/a.lbx" "$WORK/local" -o "ro,passfile=$PASSFILE,log=$WORK/local.log"
    lockbox status "$WORK/box" | shows "$URL/a.lbx"
    lockbox status "$WORK/www/a.lbx" | shows "$WORK/local"
    lockbox umount "$WORK/www/a.lbx"
    mountpoint -q "$WORK/box" || fail "the wrong one was unmounted"
    # As root, to whom modes mean nothing.
    ! touch "$WORK/box/new" 2>/dev/null || fail "it can be written"
    lockbox status --json "$WORK/box" | shows "$URL/a.lbx"
    pid=$(url_daemon)
    fetcher=$(fetchers "$pid")
    [[ -n $fetcher ]] || fail "no process fetches"
    # What the kernel's tables of connections have of the daemon's sockets.
    sockets=$(sockets_of "$pid")
    [[ -n $sockets ]] || fail "the daemon has no sockets at all"
    ! awk '{ print $10 }' /proc/net/tcp /proc/net/tcp6 | grep -Fxf <(echo "$sockets") || fail "the daemon has a connection"
    sockets_of "$fetcher" | shows -Fxf <(awk '{ print $10 }' /proc/net/tcp) ||
        fail "the process that fetches has no connection"
    # The server writes its line after the answer.
    await settled
    lockbox umount "$WORK/box"
    await gone "$fetcher"
    # The next mount asks for the start of the file and for nothing else.
    before=$(requests)
    attach_url
    diff -r "$WORK/src" "$WORK/box"
    # The mounting command and the daemon open it.
    same "$(told reads)" 1
    await has_lines "$WORK/requests" $((before + 2))
    same $(($(requests) - before)) 2 'requests with a full cache'
    # Without the process that fetches, what is not here is an error, and the mount ends as ever.
    echo 3 >/proc/sys/vm/drop_caches
    kill -9 "$(fetchers "$(url_daemon)")"
    ! cat "$WORK/box/large" >/dev/null 2>&1 || fail "who fetches is gone, and all was there"
    lockbox umount "$WORK/box"
    ! mountpoint -q "$WORK/box" || fail "still mounted"
}

case_a_file_that_is_replaced_under_its_reader_is_told() {
    local said
    publish
    serve
    attach_url cache-size=0
    head -c 100000 "$WORK/box/large" | cmp -n 100000 - "$WORK/src/large"
    # By rename, as servers are given new files, and in place.
    cp "$WORK/www/a.lbx" "$WORK/b.lbx"
    head -c 1000 /dev/urandom >"$WORK/src/new"
    lockbox add --passfile "$PASSFILE" "$WORK/b.lbx" "$WORK/src/new"
    mv "$WORK/b.lbx" "$WORK/www/a.lbx"
    said=$(cat "$WORK/box/large" 2>&1 >/dev/null) && fail "two versions were read as one"
    [[ $said == *'Stale file handle'* ]] || fail "$said"
    grep -q 'changed on its server' "$WORK/box.log" || fail "the log does not say why"
    : >"$WORK/box.log"
    lockbox umount "$WORK/box"
    attach_url cache-size=0
    cmp "$WORK/box/new" "$WORK/src/new"
    # Cut and removed.
    truncate -s 2000000 "$WORK/www/a.lbx"
    ! cat "$WORK/box/large" >/dev/null 2>&1 || fail "a cut file was read"
    rm "$WORK/www/a.lbx"
    ! cat "$WORK/box/large" >/dev/null 2>&1 || fail "a removed file was read"
    lockbox umount "$WORK/box"
    ! grep -qi damaged "$WORK/box.log" || fail "a change is told as damage"
}

# Whether as many requests came to the server as a moment ago.
settled() {
    local before
    before=$(told reads)
    cat "$WORK/box/tree/96-servers.sh" >/dev/null
    [[ $(told reads) == "$before" && $((before + 1)) == "$(requests)" ]]
}

# told FIELD: what the status of the mount has of its server.
told() {
    local said
    # A busy fetcher may not answer at once.
    has_answer() {
        said=$(lockbox status --json "$WORK/box" | python3 -c '
import json, sys
remote = json.load(sys.stdin)["remote"]
sys.exit(1) if remote is None else print(remote[sys.argv[1]])' "$1")
    }
    await has_answer "$1"
    echo "$said"
}

# says PATTERN [OPTION]: whether the status of the mount has such a line.
says() {
    lockbox status "${@:2}" "$WORK/box" | shows "$1"
}

case_a_server_that_is_away_is_waited_for_and_then_an_error() {
    local asked sent
    publish
    serve
    # The mounting command asks once, and counts nothing.
    # A busy server answers within this time.
    attach_url timeout=10s
    diff -r "$WORK/src/tree" "$WORK/box/tree"
    # Nothing is fetched ahead any more when what was asked stays the same.
    await settled
    asked=$(told reads) sent=$(told bytes)
    same "$((asked + 1))" "$(requests)"
    ((sent > 1500000 && sent < 30000000)) || fail "$sent bytes came"
    same "$(told lists) $(told offline_since)" '0 None'
    await says "^Server was asked   $asked reads, 0 lists, $sent bytes came" --all
    ! lockbox status "$WORK/box" | shows 'does not answer' || fail "it does answer"
    stop_serving
    # What is here is served.
    diff -r "$WORK/src/tree" "$WORK/box/tree"
    ! cat "$WORK/box/large" >/dev/null 2>"$WORK/said" || fail "nobody served it"
    grep -q 'Input/output error' "$WORK/said" || fail "$(cat "$WORK/said")"
    grep -q 'does not answer' "$WORK/box.log"
    : >"$WORK/box.log"
    await says 'its server does not answer since 20'
    await says '^No answer since    20' --all
    # Who asks hangs: the daemon answers all the same, without that.
    stop_process "$(fetchers "$(url_daemon)")"
    lockbox status --json "$WORK/box" | shows '"remote":null'
    kill -CONT "$(fetchers "$(url_daemon)")"
    serve
    cmp "$WORK/box/large" "$WORK/src/large"
    same "$(told offline_since)" None
    lockbox umount "$WORK/box"
    # With patience a reader sleeps through it.
    rm -rf "$WORK/cache"
    attach_url timeout=hard
    stop_serving
    in_background cmp "$WORK/box/large" "$WORK/src/large"
    local reader=$!
    await grep -q 'folio\|page\|fuse' "/proc/$reader/wchan"
    serve
    wait "$reader"
    lockbox umount "$WORK/box"
    expect 15\|17 'does not answer|refused' mount.lockbox https://127.0.0.1:1/a.lbx "$WORK/box" -o "allow-private,timeout=1s,passfile=$PASSFILE"
}

case_a_server_without_ranges_is_refused_by_name() {
    publish
    serve 'max_ranges 0;'
    expect 2 'one fault keeps' lockbox doctor --remote allow-private "$URL/a.lbx"
    grep -q '^bad *ranges *it does not serve parts of files' "$WORK/stdout" || fail "$(cat "$WORK/stdout")"
    expect 2 'does not serve parts of files' lockbox ls --passfile "$PASSFILE" --remote allow-private "$URL/a.lbx"
    expect 15\|2 'does not serve parts of files' mount.lockbox "$URL/a.lbx" "$WORK" -o "allow-private,passfile=$PASSFILE"
    # The body was not waited for.
    (($(awk '{ sum += $NF } END { print sum }' "$WORK/requests") < 20000000)) || fail "the whole file was sent"
}

case_doctor_says_what_a_server_can_do_and_asks_little_of_it() {
    publish 1000000
    serve
    lockbox doctor --remote allow-private "$URL/a.lbx" >"$WORK/words" || fail "$(cat "$WORK/words")"
    same "$(awk '{ print $1, $2 }' "$WORK/words" | tr '\n' ' ')" 'ok transport ok file ok ranges ok version ok conditions ok archive '
    # Two that look, and the opening; the server writes its line after the answer.
    await has_lines "$WORK/requests" 3
    same "$(requests)" 3
    [[ ! -e $XDG_CACHE_HOME ]] || fail "who only looks keeps something"
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt expect 2 'one fault' lockbox doctor --remote allow-private "$URL/a.lbx"
    grep -q 'certificate is not trusted' "$WORK/stdout" || fail "$(cat "$WORK/stdout")"
}
