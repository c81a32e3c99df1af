package explore_test

import (
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/s3lock"
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

const bucket = "fencelab"

func s3Client(c *http.Client, url string) *s3.Client {
	return s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: &url, UsePathStyle: true, HTTPClient: c, Credentials: credentials.NewStaticCredentialsProvider("id", "secret", ""),
		Retryer: retry.NewStandard(func(o *retry.StandardOptions) { // its own backoff is random
			o.Backoff = retry.BackoffDelayerFunc(func(int, error) (time.Duration, error) { return 100 * time.Millisecond, nil })
		}),
	})
}

// bubbleS3 is an S3 server in this process.
type bubbleS3 struct {
	tb testing.TB

	mu      sync.Mutex
	ahead   time.Duration // of its clock
	handler http.Handler
	server  *http.Server
	conns   chan net.Conn // of the server, to accept
	served  chan struct{}
}

func serveS3(tb testing.TB) explore.Server {
	tb.Helper()
	s := &bubbleS3{tb: tb}
	s.wipe()
	s.start()
	tb.Cleanup(s.stop)
	return s
}

// wipe begins with an empty bucket.
func (s *bubbleS3) wipe() {
	data := s3mem.New(s3mem.WithTimeSource(s))
	require.NoError(s.tb, data.CreateBucket(bucket))
	s.handler = gofakes3.New(data, gofakes3.WithTimeSource(s), gofakes3.WithTimeSkewLimit(0)).Server()
}

func (s *bubbleS3) start() {
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

func (s *bubbleS3) stop() {
	require.NoError(s.tb, s.server.Close())
	<-s.served
}

func (s *bubbleS3) Dial() (net.Conn, error) {
	ours, theirs := net.Pipe()
	s.conns <- theirs
	return ours, nil
}

func (s *bubbleS3) Restart(wipe bool) {
	s.stop()
	if wipe {
		s.wipe()
	}
	s.start()
}

func (s *bubbleS3) Jump(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead += d
}

// Now is the server's time.
func (s *bubbleS3) Now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Add(s.ahead)
}

func (s *bubbleS3) Since(t time.Time) time.Duration { return s.Now().Sub(t) }

// pipes is a net.Listener.
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
