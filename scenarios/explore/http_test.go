package explore_test

import (
	"bytes"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"
	minidyn "github.com/truora/minidyn/server"

	"github.com/fencelab/fencelab/dlock/s3lock"
	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/explore"
)

// onS3 is a lock in a bucket. Its leases are compared in whole seconds.
func onS3() explore.System {
	return explore.System{
		Name: "s3lock", TTL: 10 * time.Second, Servers: 1, Serve: serveS3,
		Open: func(c *explore.Client) (scenarios.Lock, error) {
			transport := &http.Transport{DialContext: c.Dial, DisableCompression: true}
			b, err := s3lock.New(s3Client(&http.Client{Transport: transport}, "http://"+c.Addr(0)), bucket, nil)
			if err != nil {
				return nil, err
			}
			return locker(c, b, plain, b.Close, func() error {
				transport.CloseIdleConnections()
				return nil
			})
		},
	}
}

const bucket, table, region = "fencelab", "fencelab", "us-east-1"

func s3Client(c *http.Client, url string) *s3.Client {
	return s3.New(s3.Options{Region: region, BaseEndpoint: &url, UsePathStyle: true, HTTPClient: c, Credentials: anybody, Retryer: retryer()})
}

func dynamoClient(c dynamodb.HTTPClient, url string) *dynamodb.Client {
	return dynamodb.New(dynamodb.Options{Region: region, BaseEndpoint: &url, HTTPClient: c, Credentials: anybody, Retryer: retryer()})
}

var anybody = credentials.NewStaticCredentialsProvider("id", "secret", "")

func retryer() aws.Retryer {
	return retry.NewStandard(func(o *retry.StandardOptions) { // its own backoff is random
		o.Backoff = retry.BackoffDelayerFunc(func(int, error) (time.Duration, error) { return 100 * time.Millisecond, nil })
	})
}

type bubbleHTTP struct {
	tb    testing.TB
	empty func(*bubbleHTTP) http.Handler

	mu      sync.Mutex
	ahead   time.Duration
	handler http.Handler
	server  *http.Server
	conns   chan net.Conn
	served  chan struct{}
}

func serveHTTP(tb testing.TB, empty func(*bubbleHTTP) http.Handler) explore.Server {
	tb.Helper()
	s := &bubbleHTTP{tb: tb, empty: empty}
	s.handler = empty(s)
	s.start()
	tb.Cleanup(s.stop)
	return s
}

func serveS3(tb testing.TB) explore.Server {
	tb.Helper()
	return serveHTTP(tb, func(s *bubbleHTTP) http.Handler {
		data := s3mem.New(s3mem.WithTimeSource(s))
		require.NoError(tb, data.CreateBucket(bucket))
		return gofakes3.New(data, gofakes3.WithTimeSource(s), gofakes3.WithTimeSkewLimit(0)).Server()
	})
}

func serveDynamo(tb testing.TB) explore.Server {
	tb.Helper()
	return serveHTTP(tb, func(*bubbleHTTP) http.Handler {
		s := &serial{Handler: minidyn.NewServer()}
		require.NoError(tb, dynamostore.CreateTable(tb.Context(), dynamoClient(s, "http://dynamodb"), table))
		return s
	})
}

// serial handles requests one by one: minidyn writes the items of replies while other requests change them.
type serial struct {
	mu sync.Mutex
	http.Handler
}

func (s *serial) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reply, err := s.Do(r)
	if err != nil {
		return
	}
	defer func() { _ = reply.Body.Close() }()
	maps.Copy(w.Header(), reply.Header)
	w.WriteHeader(reply.StatusCode)
	_, _ = io.Copy(w, reply.Body)
}

// Do is for clients without a network.
func (s *serial) Do(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body) // before the lock: this takes time
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	w := httptest.NewRecorder()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Handler.ServeHTTP(w, r)
	return w.Result(), nil
}

func (s *bubbleHTTP) start() {
	s.conns, s.served = make(chan net.Conn), make(chan struct{})
	handler, served := s.handler, s.served
	s.server = &http.Server{ReadHeaderTimeout: time.Hour, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", s.Now().UTC().Format(http.TimeFormat))
		handler.ServeHTTP(w, r)
	})}
	server := s.server
	go func() {
		defer close(served)
		_ = server.Serve(pipes(s.conns))
	}()
}

func (s *bubbleHTTP) stop() {
	require.NoError(s.tb, s.server.Close())
	<-s.served
}

func (s *bubbleHTTP) Dial() (net.Conn, error) {
	ours, theirs := net.Pipe()
	s.conns <- theirs
	return ours, nil
}

func (s *bubbleHTTP) Restart(wipe bool) {
	s.stop()
	if wipe {
		s.handler = s.empty(s)
	}
	s.start()
}

func (s *bubbleHTTP) Jump(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead += d
}

func (s *bubbleHTTP) Now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Add(s.ahead)
}

func (s *bubbleHTTP) Since(t time.Time) time.Duration { return s.Now().Sub(t) }

type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, ok := <-p; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error {
	close(p)
	return nil
}

func (p pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }
