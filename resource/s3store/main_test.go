package s3store_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/awstest"
	"github.com/fencelab/fencelab/resource/s3store"
)

// The tests run against an S3 server in the process, or against the one of FENCELAB_S3_ENDPOINT, with the credentials of
// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN and the region of AWS_REGION: an address, or "aws" for
// Amazon's. They make a bucket, and delete it.
var (
	endpoint  string
	bucket    = "fencelab-" + strings.ToLower(rand.Text())
	transport = awstest.Transport
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	if endpoint = os.Getenv("FENCELAB_S3_ENDPOINT"); endpoint == "" {
		fake := httptest.NewServer(newFake())
		defer func() {
			fake.Close()
			code = cmp.Or(code, leaks())
		}()
		endpoint = fake.URL
	}
	defer transport.CloseIdleConnections()
	ctx := context.Background()
	c := newClient(endpoint, transport)
	if _, err := c.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: &bucket}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	if err := empty(ctx, c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func leaks() int {
	if err := testmain.FindLeaks(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func newFake() http.Handler {
	return gofakes3.New(s3mem.New(), gofakes3.WithTimeSkewLimit(0)).Server()
}

// empty deletes the bucket and what is in it.
func empty(ctx context.Context, c *s3.Client) error {
	for pages := s3.NewListObjectsV2Paginator(c, &s3.ListObjectsV2Input{Bucket: &bucket}); pages.HasMorePages(); {
		page, err := pages.NextPage(ctx)
		if err != nil {
			return err
		}
		for _, o := range page.Contents {
			if _, err := c.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: o.Key}); err != nil {
				return err
			}
		}
	}
	_, err := c.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &bucket})
	return err
}

func newClient(url string, rt http.RoundTripper, more ...func(*s3.Options)) *s3.Client {
	o := s3.Options{
		Region: awstest.Region(), Credentials: awstest.Credentials(), Retryer: awstest.Retryer(), UsePathStyle: true,
		HTTPClient: &http.Client{Transport: rt}, DisableLogOutputChecksumValidationSkipped: true,
	}
	if url != "aws" {
		o.BaseEndpoint = &url
	}
	return s3.New(o, more...)
}

// once is a client that doesn't repeat requests.
func once(o *s3.Options) { o.Retryer = aws.NopRetryer{} }

// conflict is a PUT that meets another one in the server.
func conflict(r *http.Request) (*http.Response, error) {
	return refused(r, http.StatusConflict, "ConditionalRequestConflict")
}

// missing is what S3 answers to If-Match if there is no object.
func missing(r *http.Request) (*http.Response, error) {
	return refused(r, http.StatusNotFound, "NoSuchKey")
}

func refused(r *http.Request, status int, code string) (*http.Response, error) {
	_ = r.Body.Close()
	return &http.Response{
		StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
		Header: http.Header{"Content-Type": {"application/xml"}},
		Body:   io.NopCloser(strings.NewReader("<Error><Code>" + code + "</Code></Error>")),
	}, nil
}

// open returns a Store with objects of its own, and the link that it uses.
func open(tb testing.TB, prefix string, more ...func(*s3.Options)) (*s3store.Store, *awstest.Link) {
	tb.Helper()
	l := &awstest.Link{}
	s, err := s3store.New(newClient(endpoint, l, more...), bucket, &s3store.Options{Prefix: prefix})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return s, l
}

func newPrefix() string { return rand.Text() + "/" }

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }
