// Package awstest has a transport that loses replies, and test cases for stores on AWS.
package awstest

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

// Transport is under every [Link].
var Transport = &http.Transport{MaxIdleConnsPerHost: 200}

// Tests closes the idle connections of [Transport] after M's tests, so that no goroutine leaks.
type Tests struct{ M *testing.M }

// Run runs the tests.
func (t Tests) Run() int {
	defer Transport.CloseIdleConnections()
	return t.M.Run()
}

// Closer is an [io.Closer].
type Closer func() error

// Close calls c.
func (c Closer) Close() error { return c() }

// Server starts fake, unless the environment variable env has an endpoint, and stores the endpoint.
func Server(env string, fake http.Handler, endpoint *string) func(context.Context) (io.Closer, error) {
	return func(context.Context) (io.Closer, error) {
		if *endpoint = os.Getenv(env); *endpoint != "" {
			return io.NopCloser(nil), nil
		}
		server := httptest.NewServer(fake)
		*endpoint = server.URL
		return Closer(func() error {
			Transport.CloseIdleConnections()
			server.Close()
			return nil
		}), nil
	}
}

// Region is AWS_REGION, or a default.
func Region() string { return cmp.Or(os.Getenv("AWS_REGION"), "us-east-1") }

// Credentials are those of the AWS_ variables, or a default.
func Credentials() aws.CredentialsProvider {
	return credentials.NewStaticCredentialsProvider(cmp.Or(os.Getenv("AWS_ACCESS_KEY_ID"), "id"),
		cmp.Or(os.Getenv("AWS_SECRET_ACCESS_KEY"), "secret"), os.Getenv("AWS_SESSION_TOKEN"))
}

// Retryer retries at once.
func Retryer() aws.Retryer {
	return retry.NewStandard(func(o *retry.StandardOptions) {
		o.Backoff = retry.BackoffDelayerFunc(func(int, error) (time.Duration, error) { return 0, nil })
	})
}

// Link is a transport that counts requests and lets a test handle PUTs and POSTs.
type Link struct {
	mu       sync.Mutex
	requests map[string]int
	next     []Handle
}

// Handle handles a request like [http.RoundTripper].
type Handle = func(r *http.Request) (*http.Response, error)

// RoundTrip implements [http.RoundTripper].
func (l *Link) RoundTrip(r *http.Request) (*http.Response, error) {
	l.mu.Lock()
	if l.requests == nil {
		l.requests = map[string]int{}
	}
	l.requests[r.Method]++
	do := Transport.RoundTrip
	if (r.Method == http.MethodPut || r.Method == http.MethodPost) && len(l.next) > 0 {
		do, l.next = l.next[0], l.next[1:]
	}
	l.mu.Unlock()
	return do(r)
}

// On sets what handles the next PUTs and POSTs, one each.
func (l *Link) On(do ...Handle) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = do
}

// Left returns how many of [Link.On] are unused.
func (l *Link) Left() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.next)
}

// Sent returns the number of requests since the last call, by method.
func (l *Link) Sent() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	sent := l.requests
	l.requests = map[string]int{}
	return sent
}

// Total is the sum of [Link.Sent].
func (l *Link) Total() (n int) {
	for _, sent := range l.Sent() {
		n += sent
	}
	return n
}

// ErrCut is the error of a request without a reply.
var ErrCut = errors.New("the connection was cut")

// Applied sends a request and loses the reply.
func Applied(r *http.Request) (*http.Response, error) {
	resp, err := Transport.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return nil, ErrCut
}

// NotApplied loses a request.
func NotApplied(r *http.Request) (*http.Response, error) {
	_ = r.Body.Close()
	return nil, ErrCut
}

// Reply is the reply to a request that isn't sent. Errors have bodies in XML for S3, in JSON for DynamoDB.
func Reply(status int, body string) Handle {
	return func(r *http.Request) (*http.Response, error) {
		_ = r.Body.Close()
		return &http.Response{StatusCode: status, Request: r, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}, nil
	}
}

// LostReply loses replies and requests of a store whose client retries, and of one on the same records whose client doesn't.
func LostReply(t *testing.T, key string, retries resource.Store, link *Link, once resource.Store, linkOnce *Link) {
	t.Helper()
	ctx := t.Context()
	require.NoError(t, retries.Write(ctx, key, at(1), nil))
	link.On(Applied)
	h, err := resource.NewHandler(retries, nil)
	require.NoError(t, err)
	put := func() int {
		r := httptest.NewRequestWithContext(ctx, http.MethodPut, "/r/"+key, strings.NewReader("v"))
		r.Header.Set(resource.HeaderToken, "2")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	require.Equal(t, http.StatusOK, put(), "it took effect")
	require.Equal(t, http.StatusConflict, put())
	require.ErrorIs(t, retries.Write(ctx, key, at(2), []byte("v")), resource.ErrApplied)
	link.On(NotApplied)
	require.NoError(t, retries.Write(ctx, key, at(3), []byte("v")))
	for i, lose := range []Handle{Applied, NotApplied} {
		f := resource.Fence{Token: uint64(4 + i)}
		link.On(lose)
		rec, err := retries.ReadFenced(ctx, key, f)
		require.NoError(t, err)
		require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: f}, rec)
	}

	linkOnce.On(Applied)
	require.ErrorIs(t, once.Write(ctx, key, at(6), []byte("v")), ErrCut)
	require.ErrorIs(t, once.Write(ctx, key, at(6), []byte("v")), resource.ErrApplied)
	linkOnce.On(NotApplied)
	require.ErrorIs(t, once.Write(ctx, key, at(7), []byte("v")), ErrCut)
	require.NoError(t, once.Write(ctx, key, at(7), []byte("v")))

	link.On(func(r *http.Request) (*http.Response, error) { // as if a proxy had lost the reply
		_, _ = Applied(r)
		return Reply(http.StatusInternalServerError, "")(r)
	})
	require.NoError(t, retries.Write(ctx, key, at(8), []byte("v")))

	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error { return once.Write(ctx, key, at(9), []byte("v")) },
		func(ctx context.Context) error {
			_, err := once.ReadFenced(ctx, key, at(10))
			return err
		},
	} {
		ctx, cancel := context.WithCancelCause(ctx)
		linkOnce.On(func(r *http.Request) (*http.Response, error) {
			_ = r.Body.Close()
			cancel(ErrCut)
			return nil, ctx.Err()
		})
		err := call(ctx)
		require.ErrorIs(t, err, ErrCut)
		require.ErrorContains(t, err, "(the operation may still take effect)")
	}
}

// LostReplyThenLaterFence loses the reply to a write that took effect, and lets a later one in before the client retries.
func LostReplyThenLaterFence(t *testing.T, key string, s resource.Store, link *Link, rival resource.Store) {
	t.Helper()
	ctx := t.Context()
	link.On(func(r *http.Request) (*http.Response, error) {
		_, cut := Applied(r)
		return nil, errors.Join(cut, rival.Write(context.WithoutCancel(ctx), key, at(9), nil))
	})
	err := s.Write(ctx, key, at(7), []byte("v"))
	require.ErrorContains(t, err, "the write may have taken effect before: seen 9")
	_, stale := errors.AsType[*resource.StaleTokenError](err)
	require.False(t, stale)
	require.Equal(t, &resource.StaleTokenError{Key: key, Seen: at(9), Got: at(7)}, s.Write(ctx, key, at(7), []byte("v")), "no reply was lost this time")
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }
