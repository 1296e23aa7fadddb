#!/usr/bin/env bash
# What `lockbox-share setup` writes, tried with the programs that read it: systemd, nginx, and a link through that nginx.
#
#   tests/share/setup.sh [DIRECTORY WITH THE PROGRAMS]     the default is target/debug; as root, for a network of its own
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
programs=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/debug}")
place=$(mktemp -d "${TMPDIR:-/tmp}/lockbox-setup.XXXXXX")
trap 'rm -rf "$place"' EXIT
name=share.example.org
cd "$place"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 2 -subj "/CN=$name" \
    -addext "subjectAltName=DNS:$name" -addext basicConstraints=critical,CA:FALSE 2>/dev/null

for proxy in nginx none caddy; do
    "$programs/lockbox-share" setup --root "$place/$proxy" --name $name --proxy $proxy --cert "$place/cert.pem" --key "$place/key.pem" \
        --proxy-user root --program "$programs/lockbox-share" --yes >"told-$proxy"
    unit=$place/$proxy/etc/systemd/system/lockbox-share.service
    # What systemd says of the machine's other units is not this test's.
    systemd-analyze verify --man=no "$unit" >verified 2>&1 || { cat verified; exit 1; }
    if grep -q lockbox-share verified; then cat verified; exit 1; fi
    echo "ok      systemd takes the unit for $proxy"
done
if command -v caddy >/dev/null; then
    caddy validate --adapter caddyfile --config caddy/etc/caddy/lockbox-share.caddy >verified 2>&1 || { cat verified; exit 1; }
    echo "ok      caddy takes its file"
else
    echo "NOT TRIED: caddy is not installed; what is written for it was compared with its text alone"
fi

cat >nginx.conf <<END
user root;
pid $place/nginx.pid;
error_log $place/nginx.log;
events {}
http {
    client_body_temp_path $place/body;
    proxy_temp_path $place/proxied;
    fastcgi_temp_path $place/fastcgi;
    uwsgi_temp_path $place/uwsgi;
    scgi_temp_path $place/scgi;
    include $place/nginx/etc/nginx/conf.d/*.conf;
}
END
chmod 755 "$place"
nginx -t -c "$place/nginx.conf" -e "$place/nginx.log" 2>verified || { cat verified; exit 1; }
echo "ok      nginx takes its file"

# As the unit starts it, with the directories that systemd would give it.
command=$(sed -n 's/^ExecStart=\(.\)/\1/p' "nginx/etc/systemd/system/lockbox-share.service.d/setup.conf")
command=${command//%S/$place/state}
command=${command//%t/$place/run}
mkdir -p state run/lockbox-share
printf '127.0.0.1 localhost %s\n' $name >hosts
export programs place name command

# through PROXY CERTIFICATE MOVED: a link through what this starts, in a network of its own; MOVED is how it says that http became https.
through() {
    unshare --net --mount bash -euo pipefail -s "$@" <<'END'
mount --bind "$place/hosts" /etc/hosts
# Where the proxies look for the daemon, in this namespace alone.
mount -t tmpfs none /run
mkdir /run/lockbox-share
mount --bind "$place/run/lockbox-share" /run/lockbox-share
ip link set lo up
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy
export XDG_STATE_HOME=$place/mine XDG_RUNTIME_DIR=$place/mine-run XDG_DATA_HOME=$place/data XDG_CONFIG_HOME=$place/config SSL_CERT_FILE=$place/$2
mkdir -p "$XDG_RUNTIME_DIR"
$command --metrics-listen none >daemon.log 2>&1 &
daemon=$!
trap 'kill "$daemon" "${proxy-}"; wait' EXIT
case $1 in
nginx)
    nginx -g 'daemon off;' -c "$place/nginx.conf" -e "$place/nginx.log" &
    proxy=$!
    ;;
caddy)
    caddy run --config "$place/caddy/etc/caddy/Caddyfile" >caddy.log 2>&1 &
    proxy=$!
    ;;
esac
until [[ -e $2 ]] && curl --silent --output /dev/null --cacert "$2" "https://$name/"; do kill -0 "$proxy"; sleep 0.05; done
until grep -q '^ready=1' daemon.log; do kill -0 "$daemon"; sleep 0.05; done
if grep -q 'can open links of' daemon.log; then cat daemon.log; exit 1; fi
head -c 20000000 /dev/urandom >big
socket=$place/run/lockbox-share/lockbox-share.sock
link=$("$programs/lockbox" share big --socket "$socket" 2>said)
[[ $link == https://$name/s/* ]]
# Nobody is told that others could not open it.
[[ $(wc -l <said) == 1 ]]
"$programs/lockbox" receive -o got <<<"$link"
cmp big got
rm got
# Through the proxy nobody makes shares, whatever is sent and in whatever parts. Caddy hangs up on who sends much more than is wanted.
[[ $1 == nginx ]] || head -c 20000 /dev/urandom >big
code=0
"$programs/lockbox" share - --server "https://$name" <big 2>said || code=$?
[[ $code == 2 ]] && grep -q 'refused' said
# The page, over https alone, and its looking: the daemon's headers are all there.
curl --silent --fail --cacert "$2" --output page --dump-header headers "https://$name/s/1234567890123"
grep -q '<title>' page
curl --silent --fail --output /dev/null --dump-header own --unix-socket "$socket" http://127.0.0.1/s/1234567890123
for of in headers own; do
    tr -d '\r' <$of | sed 's/^[^:]*/\L&/' | grep -v -e '^http/' -e ^date: -e '^$' | sort >$of.sorted
done
[[ $(wc -l <own.sorted) -ge 10 ]]
[[ ! $(comm -13 headers.sorted own.sorted) ]] || { comm -13 headers.sorted own.sorted; exit 1; }
[[ $(curl --silent --output /dev/null --write-out '%{http_code} %{redirect_url}' "http://$name/s/1") == "$3 https://$name/s/1" ]]
# No log holds which links are opened from where.
if grep -rF "${link#https://*/s/}" ./*.log || grep -F /s/1234567890123 ./*.log; then exit 1; fi
END
    echo "ok      a link goes through $1 as it was set up"
}
through nginx cert.pem 301
if command -v caddy >/dev/null; then
    # What the text says is to be put there, and a certificate of Caddy's own, as no other machine knows the name.
    printf '{\n\tlocal_certs\n\tskip_install_trust\n}\nimport lockbox-share.caddy\n' >caddy/etc/caddy/Caddyfile
    through caddy data/caddy/pki/authorities/local/root.crt 308
fi
