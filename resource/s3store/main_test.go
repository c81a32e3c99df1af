package s3store_test

import (
	"context"
	"crypto/rand"
	"io"
	"net/http"
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

// The tests use a server in the process, or FENCELAB_S3_ENDPOINT, an address or "aws", with AWS_ACCESS_KEY_ID,
// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION. They create and delete a bucket.
var (
	endpoint  string
	bucket    = "fencelab-" + strings.ToLower(rand.Text())
	transport = awstest.Transport
)

func TestMain(m *testing.M) {
	testmain.Run(awstest.Tests{M: m}, awstest.Server("FENCELAB_S3_ENDPOINT", newFake(), &endpoint), createBucket)
}

func newFake() http.Handler {
	return gofakes3.New(s3mem.New(), gofakes3.WithTimeSkewLimit(0)).Server()
}

func createBucket(ctx context.Context) (io.Closer, error) {
	c := newClient(endpoint, transport)
	_, err := c.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: &bucket})
	return awstest.Closer(func() error { return deleteBucket(context.WithoutCancel(ctx), c) }), err
}

func deleteBucket(ctx context.Context, c *s3.Client) error {
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

func once(o *s3.Options) { o.Retryer = aws.NopRetryer{} }

var (
	conflict = refused(http.StatusConflict, "ConditionalRequestConflict")
	missing  = refused(http.StatusNotFound, "NoSuchKey") // S3's reply to If-Match without an object
)

func refused(status int, code string) awstest.Handle {
	return awstest.Reply(status, "<Error><Code>"+code+"</Code></Error>")
}

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
