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
        --program "$programs/lockbox-share" --yes >"told-$proxy"
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
printf '127.0.0.1 %s\n' $name >hosts
export programs place name command
unshare --net --mount bash -euo pipefail <<'END'
mount --bind "$place/hosts" /etc/hosts
ip link set lo up
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy
export XDG_STATE_HOME=$place/mine XDG_RUNTIME_DIR=$place/mine-run SSL_CERT_FILE=$place/cert.pem
mkdir -p "$XDG_RUNTIME_DIR"
$command --metrics-listen none >daemon.log 2>&1 &
daemon=$!
nginx -c "$place/nginx.conf" -e "$place/nginx.log"
trap 'kill "$daemon" "$(cat nginx.pid)"; wait' EXIT
until grep -q '^ready=1' daemon.log; do kill -0 "$daemon"; sleep 0.05; done
if grep -q 'opens links of' daemon.log; then cat daemon.log; exit 1; fi
head -c 20000000 /dev/urandom >big
socket=$place/run/lockbox-share/lockbox-share.sock
link=$("$programs/lockbox" share big --socket "$socket" 2>said)
[[ $link == https://$name/s/* ]]
# Nobody is told that others could not open it.
[[ $(wc -l <said) == 1 ]]
"$programs/lockbox" receive -o got <<<"$link"
cmp big got
# Through the proxy nobody makes shares, whatever is sent and in whatever parts.
code=0
"$programs/lockbox" share - --server "https://$name" <big 2>said || code=$?
[[ $code == 2 ]] && grep -q 'refused' said
# The page, over https alone, and its looking.
curl --silent --fail --cacert cert.pem --output page "https://$name/s/1234567890123"
grep -q '<title>' page
[[ $(curl --silent --output /dev/null --write-out '%{http_code} %{redirect_url}' "http://$name/s/1") == "301 https://$name/s/1" ]]
END
echo "ok      a link goes through nginx as it was set up"
