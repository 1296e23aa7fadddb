//! The least that a server can do: the daemon's sockets and event loops, and one ready-made answer to whatever comes. What the
//! benchmarks compare the daemon with.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Answers every connection's one request until it is dropped. To be called in a runtime of its own.
///
/// # Errors
/// When the socket cannot be registered.
pub async fn run(listener: std::net::TcpListener, answer: &'static [u8]) -> io::Result<()> {
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

/// Whether head and body of the one request have come. The benchmark's client writes `content-length` in small letters.
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
