package s3lock_test

import (
	"bytes"
	"context"
	"flag"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/s3lock"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const bucket = "fencelab"

// server is the S3 server of the tests that need one, unless it is missing.
var (
	server  *testbed.Server
	missing error
	made    sync.Once // the bucket
)

func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "16") // unless the command says otherwise: tests wait for the server's clock
	testmain.Run(m, func(ctx context.Context) (io.Closer, error) {
		if server, missing = testbed.StartS3(ctx, nil); missing != nil {
			return io.NopCloser(nil), nil //nolint:nilerr // tests in virtual time need none; the others ask for it
		}
		return server, nil
	})
}

// site is an S3 server, real or in the bubble, with the bucket.
type site struct {
	url, id, secret string
	dial            dlocktest.DialFunc
}

func realSite(tb testing.TB) site {
	tb.Helper()
	testbed.Need(tb, missing)
	u, err := url.Parse(server.URL)
	require.NoError(tb, err)
	secret, _ := u.User.Password()
	s := site{"http://" + u.Host, u.User.Username(), secret, (&net.Dialer{}).DialContext}
	made.Do(func() { makeBucket(tb, s) })
	return s
}

func makeBucket(tb testing.TB, s site) {
	tb.Helper()
	_, err := s.client(tb, nil).CreateBucket(tb.Context(), &s3.CreateBucketInput{Bucket: aws.String(bucket)})
	require.NoError(tb, err)
}

// newSite starts a server on pipes, for a bubble. wrap, if not nil, wraps it.
func newSite(tb testing.TB, wrap func(http.Handler) http.Handler) site {
	tb.Helper()
	h := gofakes3.New(s3mem.New(), gofakes3.WithTimeSkewLimit(0)).Server()
	if wrap != nil {
		h = wrap(h)
	}
	l := &listener{conns: make(chan net.Conn), closed: make(chan struct{})}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(l)
	}()
	tb.Cleanup(func() {
		require.NoError(tb, srv.Close())
		<-served
	})
	s := site{"http://127.0.0.1:1", "id", "secret", l.dial}
	makeBucket(tb, s)
	return s
}

type listener struct {
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *listener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (l *listener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// link counts requests, and lets a test handle all of them, or the next ones with a method.
type link struct {
	http.RoundTripper
	mu   sync.Mutex
	sent map[string]int
	all  func(*http.Request) (*http.Response, error) // nil: they pass
	next map[string][]func(*http.Request) (*http.Response, error)
}

func (l *link) RoundTrip(r *http.Request) (*http.Response, error) {
	l.mu.Lock()
	l.sent[r.Method]++
	do := l.RoundTripper.RoundTrip
	if l.all != nil {
		do = l.all
	}
	if q := l.next[r.Method]; len(q) > 0 {
		do, l.next[r.Method] = q[0], q[1:]
	}
	l.mu.Unlock()
	return do(r)
}

func (l *link) on(method string, do ...func(*http.Request) (*http.Response, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next[method] = do
}

// fail has all handle requests, until it is nil.
func (l *link) fail(all func(*http.Request) (*http.Response, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = all
}

// requests returns the number of requests since the last call, by method.
func (l *link) requests() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	sent := l.sent
	l.sent = map[string]int{}
	return sent
}

// client returns a client that repeats requests at once. dial replaces the site's, unless it is nil.
func (s site) client(tb testing.TB, dial dlocktest.DialFunc, more ...func(*s3.Options)) *s3.Client {
	tb.Helper()
	if dial == nil {
		dial = s.dial
	}
	transport := &http.Transport{DialContext: dial, MaxIdleConnsPerHost: 200}
	tb.Cleanup(transport.CloseIdleConnections)
	return s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: &s.url, UsePathStyle: true, Credentials: credentials.NewStaticCredentialsProvider(s.id, s.secret, ""),
		HTTPClient: &http.Client{Transport: transport}, DisableLogOutputChecksumValidationSkipped: true,
		Retryer: retry.NewStandard(func(o *retry.StandardOptions) {
			o.Backoff = retry.BackoffDelayerFunc(func(int, error) (time.Duration, error) { return 0, nil })
		}),
	}, more...)
}

func (s site) backend(tb testing.TB, dial dlocktest.DialFunc, poll time.Duration, more ...func(*s3.Options)) *s3lock.Backend {
	tb.Helper()
	b, err := s3lock.New(s.client(tb, dial, more...), bucket, &s3lock.Options{Poll: poll})
	require.NoError(tb, err)
	return b
}

// linked returns a Backend with a link of its own.
func (s site) linked(tb testing.TB, more ...func(*s3.Options)) (*s3lock.Backend, *link) {
	tb.Helper()
	l := &link{sent: map[string]int{}, next: map[string][]func(*http.Request) (*http.Response, error){}}
	b := s.backend(tb, nil, 0, append(more, func(o *s3.Options) {
		c := o.HTTPClient.(*http.Client)
		l.RoundTripper, c.Transport = c.Transport, l
	})...)
	tb.Cleanup(func() { require.NoError(tb, b.Close()) })
	return b, l
}

func once(o *s3.Options) { o.Retryer = aws.NopRetryer{} }

// faulty returns a Backend and its link. A fault disturbs PUTs, so that one whose reply is lost has been carried out, and whatever
// follows the first of them.
func (s site) faulty(tb testing.TB) (*s3lock.Backend, dlocktest.Link) {
	tb.Helper()
	var put atomic.Bool
	d := dlocktest.NewDialer(s.dial, func(b []byte) bool {
		if !bytes.HasPrefix(b, []byte("GET ")) { // the beginning of a PUT, or its body
			put.Store(true)
		}
		return put.Load()
	})
	l := d.Link()
	for _, inject := range []*func() (heal func()){&l.LoseRequests, &l.LoseReplies, &l.HoldReplies, &l.Cut} {
		f := *inject
		*inject = func() func() {
			put.Store(false)
			return f()
		}
	}
	return s.backend(tb, d.DialContext, poll), l
}
