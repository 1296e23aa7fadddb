//! Baseline server in a process of its own: the daemon's sockets and event loops, and one fixed
//! response, read from standard input, to every request.

use std::io::{self, Read, Write};
use std::net::SocketAddr;

use lockbox_share::http::listen;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::serve::processors;

pub(crate) fn run() -> Result<(), String> {
    let mut answer = Vec::new();
    io::stdin().read_to_end(&mut answer).map_err(|error| format!("cannot read the answer: {error}"))?;
    // For as long as the process lives.
    let answer: &'static [u8] = answer.leak();
    let listen::Tcp { address, listeners } = listen::tcp(SocketAddr::from(([127, 0, 0, 1], 0)), processors())?;
    let serve = move |listener| -> io::Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(answer_all(listener, answer))
    };
    let threads: Vec<_> = listeners.into_iter().map(|listener| std::thread::spawn(move || serve(listener))).collect();
    let mut out = io::stdout().lock();
    writeln!(out, "http={address}\nready=1").and_then(|()| out.flush()).map_err(|error| error.to_string())?;
    for thread in threads {
        thread.join().map_err(|_| "an event loop ended by a panic")?.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Answers every connection's one request.
async fn answer_all(listener: std::net::TcpListener, answer: &'static [u8]) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            tokio::spawn(serve(stream, answer));
        }
    }
}

async fn serve(mut stream: TcpStream, answer: &'static [u8]) -> io::Result<()> {
    let mut request = Vec::with_capacity(8 * 1024);
    while !is_whole(&request) {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    stream.write_all(answer).await?;
    stream.shutdown().await
}

/// Whether head and body of the one request have come. The benchmark's client writes
/// `content-length` in small letters.
fn is_whole(request: &[u8]) -> bool {
    let Some(end) = request.windows(4).position(|window| window == b"\r\n\r\n") else { return false };
    const NAME: &[u8] = b"content-length: ";
    let Some(at) = request[..end].windows(NAME.len()).position(|window| window == NAME) else { return true };
    let digits = request[at + NAME.len()..end].iter().take_while(|byte| byte.is_ascii_digit());
    let length = digits.fold(0usize, |sum, digit| sum.saturating_mul(10).saturating_add(usize::from(digit - b'0')));
    request.len() - end - 4 >= length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_whole_with_its_body() {
        assert!(is_whole(b"GET / HTTP/1.1\r\n\r\n"));
        assert!(!is_whole(b"GET / HTTP/1.1\r\n"));
        assert!(!is_whole(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nab"));
        assert!(is_whole(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc"));
    }
}
