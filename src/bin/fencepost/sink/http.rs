//! The HTTP half: every request is an arrival, except `GET /` and what is below `/_sink`.
//!
//! The order is always: read the whole body, record, then obey the behaviour. A request whose body
//! never became complete is no arrival.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::behaviour::Cut;
use super::store::{Content, Store};
use super::{BODY_BYTES_MAX, listing};

type Answer = Response<Full<Bytes>>;

/// The connection is to be closed without an answer: hyper does that when a service fails.
#[derive(Debug)]
pub(super) struct CutNow;

impl fmt::Display for CutNow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cut before the answer")
    }
}

impl std::error::Error for CutNow {}

/// Serves one connection until either side ends it.
pub(super) async fn serve(stream: TcpStream, store: Arc<Store>) {
    // A failure only means slower answers.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let store = Arc::clone(&store);
        async move { answer(&store, request).await }
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    let connection = server.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
    // Ends with an error when the client goes away or when we cut; neither is news.
    let _ = connection.await;
}

async fn answer(store: &Store, request: Request<Incoming>) -> Result<Answer, CutNow> {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let bytes = match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return Ok(too_large()),
        Err(_) => return Err(CutNow),
    };
    let place = head.uri.path();
    if place == "/_sink" || place.starts_with("/_sink/") || (place == "/" && head.method == Method::GET) {
        return Ok(control(store, &head.method, place, &bytes));
    }
    let content =
        Content::Webhook { method: head.method.to_string(), path, headers: headers(&head.headers), body: bytes };
    match store.record(content) {
        Ok(_) => obey(store).await,
        Err(error) => {
            eprintln!("fencepost: can't write the log: {error}");
            Ok(problem(StatusCode::INTERNAL_SERVER_ERROR, "the sink can't write its log"))
        }
    }
}

fn headers(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

async fn obey(store: &Store) -> Result<Answer, CutNow> {
    tokio::time::sleep(Duration::from_millis(store.behaviour().http.delay_ms)).await;
    let http = store.released(|behaviour| behaviour.http.hold).await.http;
    if http.cut == Some(Cut::BeforeAnswer) {
        return Err(CutNow);
    }
    // The range was checked when the behaviour was set.
    let status = StatusCode::from_u16(http.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = json_answer(status, &json!({ "ok": status.is_success() }));
    if http.cut == Some(Cut::AfterAnswer) {
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(answer)
}

/// The sink's own pages.
fn control(store: &Store, method: &Method, path: &str, body: &[u8]) -> Answer {
    match (method.as_str(), path) {
        ("GET", "/" | "/_sink" | "/_sink/") => text_answer(listing::text(store)),
        ("GET", "/_sink/arrivals") => arrivals(store),
        ("DELETE", "/_sink/arrivals") => {
            store.clear();
            json_answer(StatusCode::OK, &json!({ "ok": true }))
        }
        ("GET", "/_sink/behaviour") => json_answer(StatusCode::OK, &json!(store.behaviour())),
        ("PUT", "/_sink/behaviour") => match store.change_behaviour(body) {
            Ok(()) => json_answer(StatusCode::OK, &json!(store.behaviour())),
            Err(text) => problem(StatusCode::BAD_REQUEST, &text),
        },
        (_, "/_sink" | "/_sink/" | "/_sink/arrivals" | "/_sink/behaviour") => {
            problem(StatusCode::METHOD_NOT_ALLOWED, "this method does nothing here")
        }
        _ => problem(StatusCode::NOT_FOUND, "there are /_sink, /_sink/arrivals and /_sink/behaviour"),
    }
}

fn arrivals(store: &Store) -> Answer {
    let (arrivals, dropped) = store.arrivals();
    let arrivals: Vec<Value> = arrivals.iter().map(|arrival| arrival.to_json()).collect();
    json_answer(StatusCode::OK, &json!({ "arrivals": arrivals, "dropped": dropped }))
}

/// The rest of the body was not read, so the connection can't be used again.
fn too_large() -> Answer {
    let mut answer = problem(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than the sink takes");
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    answer
}

fn problem(status: StatusCode, text: &str) -> Answer {
    json_answer(status, &json!({ "ok": false, "error": text }))
}

fn json_answer(status: StatusCode, value: &Value) -> Answer {
    full_answer(status, "application/json", value.to_string())
}

fn text_answer(text: String) -> Answer {
    full_answer(StatusCode::OK, "text/plain; charset=utf-8", text)
}

fn full_answer(status: StatusCode, kind: &'static str, text: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
