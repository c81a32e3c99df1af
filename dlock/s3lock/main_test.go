package s3lock_test

import (
	"context"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/s3lock"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const bucket = "fencelab"

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

type site struct {
	url, id, secret string
	http.RoundTripper
}

func realSite(tb testing.TB) site {
	tb.Helper()
	testbed.Need(tb, missing)
	u, err := url.Parse(server.URL)
	require.NoError(tb, err)
	secret, _ := u.User.Password()
	t := &http.Transport{MaxIdleConnsPerHost: 200}
	tb.Cleanup(t.CloseIdleConnections)
	s := site{"http://" + u.Host, u.User.Username(), secret, t}
	made.Do(func() { makeBucket(tb, s) })
	return s
}

func makeBucket(tb testing.TB, s site) {
	tb.Helper()
	_, err := s.client().CreateBucket(tb.Context(), &s3.CreateBucketInput{Bucket: aws.String(bucket)})
	require.NoError(tb, err)
}

// fake is an S3 server that may ignore a header of requests, and omit one of replies.
type fake struct {
	http.Handler
	ignores, omits string
}

func newSite(tb testing.TB) (site, *fake) {
	tb.Helper()
	f := &fake{Handler: gofakes3.New(s3mem.New(), gofakes3.WithTimeSkewLimit(0)).Server()}
	s := site{"http://s3", "id", "secret", f}
	makeBucket(tb, s)
	return s, f
}

func (f *fake) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Content-Length", strconv.FormatInt(r.ContentLength, 10))
	r.Header.Del(f.ignores)
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	resp := w.Result()
	resp.Request = r
	resp.Header.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	resp.Header.Del(f.omits)
	return resp, nil
}

// client returns a client that repeats requests at once.
func (s site) client() *s3.Client { return s.over(locktest.NewWire()) }

func (s site) over(w *locktest.Wire, more ...func(*s3.Options)) *s3.Client {
	return s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: &s.url, UsePathStyle: true, Credentials: credentials.NewStaticCredentialsProvider(s.id, s.secret, ""),
		HTTPClient: &http.Client{Transport: locktest.Transport{
			Wire: w, Base: s.RoundTripper, Kind: func(r *http.Request, _ []byte) string { return strings.ToLower(r.Method) },
		}},
		DisableLogOutputChecksumValidationSkipped: true,
		Retryer: retry.NewStandard(func(o *retry.StandardOptions) {
			o.Backoff = retry.BackoffDelayerFunc(func(int, error) (time.Duration, error) { return 0, nil })
		}),
	}, more...)
}

func backend(tb testing.TB, c *s3.Client, poll time.Duration) *s3lock.Backend {
	tb.Helper()
	b, err := s3lock.New(c, bucket, &s3lock.Options{Poll: poll})
	require.NoError(tb, err)
	return b
}
