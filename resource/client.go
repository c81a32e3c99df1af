package resource

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"github.com/fencelab/fencelab/internal/http1"
)

// ClientOptions configure [NewClient].
type ClientOptions struct {
	// Token is sent as "Authorization: Bearer TOKEN"; empty: no such header is sent.
	Token string
	// MaxBody is the largest value in bytes that a read accepts, at least 4096; [DefaultMaxBody] if zero.
	MaxBody int64
	// AllowUnfenced accepts replies of a resource with fencing off, for experiments.
	AllowUnfenced bool
	// HTTPClient replaces the default client, which has its own connection pool, unless nil. Its CheckRedirect is ignored.
	HTTPClient *http.Client
}

// Client is a [Store] over HTTP, on a server that runs [NewHandler].
//
// It never sends a write twice: it treats redirects as errors, and its default HTTPClient speaks HTTP/1.1. A transport of your own
// that speaks HTTP/2 may retry a request that the server has reset. No proxy may retry a PUT (nginx: proxy_next_upstream off): if
// the first attempt takes effect and the retry is refused because of a later token, the [*StaleTokenError] is wrong.
type Client struct {
	http          *http.Client
	base          string
	token         string
	maxBody       int64
	allowUnfenced bool

	mu       sync.Mutex
	closed   bool
	inFlight sync.WaitGroup
}

var _ Store = (*Client)(nil)

// NewClient returns a client of the resource at baseURL, such as "http://127.0.0.1:8080". opts may be nil.
func NewClient(baseURL string, opts *ClientOptions) (*Client, error) {
	u, err := url.Parse(baseURL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || strings.ContainsAny(baseURL, "?#") {
		return nil, fmt.Errorf("resource: base URL %q is not of the form http://host:port or https://host:port", redact(baseURL))
	}
	var o ClientOptions
	if opts != nil {
		o = *opts
	}
	if o.MaxBody < 0 {
		return nil, fmt.Errorf("resource: ClientOptions.MaxBody is %d; it must not be negative", o.MaxBody)
	}
	c := &Client{
		base: strings.TrimSuffix(baseURL, "/"), token: o.Token, maxBody: cmp.Or(o.MaxBody, DefaultMaxBody), allowUnfenced: o.AllowUnfenced,
	}
	if o.HTTPClient != nil {
		c.http = new(*o.HTTPClient)
	} else {
		c.http = &http.Client{Transport: http1.Transport()}
	}
	c.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return c, nil
}

// redact returns baseURL, which may be invalid, without user information and query, which may be secret.
func redact(baseURL string) string {
	if at := strings.LastIndex(baseURL, "@"); at >= 0 {
		baseURL = "..." + baseURL[at:]
	}
	if i := strings.IndexAny(baseURL, "?#"); i >= 0 {
		baseURL = baseURL[:i+1] + "..."
	}
	return baseURL
}

// Write is [Store.Write].
func (c *Client) Write(ctx context.Context, key string, f Fence, value []byte) error {
	if err := CheckFence(f); err != nil {
		return err
	}
	_, err := c.do(ctx, http.MethodPut, key, f, value)
	return err
}

// WriteUnfenced writes without a token, which a resource that enforces fencing refuses.
func (c *Client) WriteUnfenced(ctx context.Context, key string, value []byte) error {
	_, err := c.do(ctx, http.MethodPut, key, Fence{}, value)
	return err
}

// Read is [Store.Read].
func (c *Client) Read(ctx context.Context, key string) (Record, error) {
	return c.do(ctx, http.MethodGet, key, Fence{}, nil)
}

// ReadFenced is [Store.ReadFenced].
func (c *Client) ReadFenced(ctx context.Context, key string, f Fence) (Record, error) {
	if err := CheckToken(f.Token); err != nil {
		return Record{}, err
	}
	return c.do(ctx, http.MethodGet, key, f, nil)
}

// Close is [Store.Close]. It closes idle connections, including those of [ClientOptions.HTTPClient].
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.inFlight.Wait()
	c.http.CloseIdleConnections()
	return nil
}

func (c *Client) begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrClosed
	}
	c.inFlight.Add(1)
	return nil
}

func (c *Client) do(ctx context.Context, method, key string, f Fence, value []byte) (Record, error) {
	if err := cmp.Or(CheckContext(ctx), CheckKey(key)); err != nil {
		return Record{}, err
	}
	if err := c.begin(); err != nil {
		return Record{}, err
	}
	defer c.inFlight.Done()
	rec, err := c.send(ctx, method, key, f, value)
	if err == nil || errors.Is(err, ErrNotFound) {
		return rec, err
	}
	if _, stale := errors.AsType[*StaleTokenError](err); stale {
		return Record{}, err
	}
	if late := ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))); late && (method != http.MethodGet || f != Fence{}) {
		err = fmt.Errorf("%w (the operation may still take effect)", err)
	}
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return Record{}, fmt.Errorf("resource: %s %q: %w", method, key, err)
}

func (c *Client) send(ctx context.Context, method, key string, f Fence, value []byte) (Record, error) {
	value = bytes.Clone(value) // a transport may send it after it has returned
	req, err := http.NewRequestWithContext(ctx, method, c.base+pathPrefix+escape(key), bytes.NewReader(value))
	if err != nil {
		return Record{}, err
	}
	req.Header.Set("Accept", rawType)
	req.Header.Set(HeaderKey, url.PathEscape(key))
	if f.Token > 0 {
		req.Header.Set(HeaderToken, strconv.FormatUint(f.Token, 10))
	}
	if f.Seq > 0 {
		req.Header.Set(HeaderSeq, strconv.FormatUint(f.Seq, 10))
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return Record{}, err
	}
	body, err := c.read(resp)
	if err != nil {
		return Record{}, fmt.Errorf("reply %s: %w", resp.Status, err)
	}
	// Only a resource sets these headers; without them even a 200 proves nothing.
	maxFence, errMax := ParseFence(resp.Header.Get(HeaderMax))
	seen, errSeen := ParseFence(resp.Header.Get(HeaderSeen))
	switch {
	case resp.StatusCode == http.StatusOK && errMax == nil:
		rec := Record{MaxFence: maxFence}
		if err := c.checkEnforced(resp.Header, f, maxFence); err != nil {
			return Record{}, err
		}
		// Without our Accept header, a resource replies with JSON.
		if t := resp.Header.Get("Content-Type"); method == http.MethodGet && t != rawType {
			return Record{}, fmt.Errorf("the reply has type %q, want %q: does a proxy change it, or drop Accept?", t, rawType)
		}
		written := resp.Header.Get(HeaderWritten)
		switch {
		case method != http.MethodGet, written == "false" && len(body) == 0:
		case written == "true":
			rec.Value = body
		default:
			return Record{}, fmt.Errorf("the reply has %d bytes and %s %q: does a proxy change it?", len(body), HeaderWritten, written)
		}
		return rec, nil
	case resp.StatusCode == http.StatusNotFound && errMax == nil: // even for a fenced read, if a proxy dropped its token
		return Record{}, cmp.Or(c.checkEnforced(resp.Header, f, maxFence), ErrNotFound)
	case resp.StatusCode == http.StatusConflict && errSeen == nil:
		if AdmitsWrite(seen, f) || method == http.MethodGet && AdmitsRead(seen, f) { // not a refusal of f
			return Record{}, mismatch(f, seen)
		}
		applied := resp.Header.Get(HeaderApplied)
		if applied != "true" && applied != "false" {
			return Record{}, fmt.Errorf("the refusal has no valid %s header: does a proxy drop it?", HeaderApplied)
		}
		return Record{}, &StaleTokenError{Key: key, Seen: seen, Got: f, Applied: applied == "true"}
	case resp.StatusCode == http.StatusOK:
		return Record{}, fmt.Errorf("the reply has no valid %s header: is there a resource at %s?", HeaderMax, redact(c.base))
	}
	var p problem
	if json.Unmarshal(body, &p) != nil || p.Error == "" {
		switch to := resp.Header.Get("Location"); {
		case resp.StatusCode == http.StatusRequestEntityTooLarge:
			return Record{}, fmt.Errorf("%s: not from the resource: raise the limit of the proxy in front of it (nginx: client_max_body_size)", resp.Status)
		case resp.StatusCode/100 == 3 && to != "":
			return Record{}, fmt.Errorf("%s to %q: redirects are not followed: correct the base URL", resp.Status, redact(to))
		}
		return Record{}, errors.New(resp.Status)
	}
	err = fmt.Errorf("%s: %s", resp.Status, p.Error)
	switch {
	case p.Jump:
		err = fmt.Errorf("%w: %w", ErrJump, err)
	case resp.StatusCode == http.StatusRequestEntityTooLarge:
		err = fmt.Errorf("%w: %w", ErrTooLarge, err)
	case resp.StatusCode == http.StatusInsufficientStorage:
		err = fmt.Errorf("%w: %w", ErrNoRoom, err)
	}
	return Record{}, err
}

// checkEnforced returns an error if the reply to an accepted call shows that f was not checked.
func (c *Client) checkEnforced(h http.Header, f, maxFence Fence) error {
	switch {
	case f == Fence{} || c.allowUnfenced:
		return nil
	case h.Get(HeaderFencing) == "off":
		return fmt.Errorf("%w: the resource at %s runs with fencing off", ErrUnfenced, redact(c.base))
	case f.Seq > 0 && maxFence != f, maxFence.Token != f.Token:
		return mismatch(f, maxFence)
	}
	return nil
}

func mismatch(sent, got Fence) error {
	return fmt.Errorf("%w: the request had fence %v, and the reply has %v: does a proxy drop %s or %s?", ErrUnfenced, sent, got, HeaderToken, HeaderSeq)
}

// read reads resp's body to its end, for reuse of the connection. The result is not nil.
func (c *Client) read(resp *http.Response) ([]byte, error) {
	limit := max(c.maxBody, 4096) // for error replies
	b, err := io.ReadAll(http.MaxBytesReader(nil, resp.Body, limit))
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		err = fmt.Errorf("it is larger than the limit of %d bytes (ClientOptions.MaxBody)", limit)
	}
	return b, errors.Join(err, resp.Body.Close())
}

// escape makes key one path segment that proxies don't clean. [HeaderKey] detects one that unescapes it first.
func escape(key string) string {
	if key == "." || key == ".." {
		return strings.ReplaceAll(key, ".", "%2E")
	}
	return url.PathEscape(key)
}
