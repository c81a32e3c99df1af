package locks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/fencelab/fencelab/dlock/s3lock"
)

// openS3 also creates the bucket if necessary. It is "locks" if the address names none.
func openS3(ctx context.Context, s Spec) (*Backend, error) {
	addr, err := s.one()
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(addr)
	secret, ok := "", false
	if err == nil {
		secret, ok = u.User.Password()
	}
	bucket := "locks"
	if err == nil && strings.Trim(u.Path, "/") != "" {
		bucket = strings.Trim(u.Path, "/")
	}
	if !ok || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || strings.Contains(bucket, "/") { // it may hold a secret
		return nil, errors.New("locks: the S3 address is not like http://ID:SECRET@HOST:PORT or http://ID:SECRET@HOST:PORT/BUCKET")
	}
	transport := &http.Transport{DialContext: s.Dial}
	endpoint := u.Scheme + "://" + u.Host
	c := s3.New(s3.Options{
		Region: cmp.Or(os.Getenv("AWS_REGION"), "us-east-1"), BaseEndpoint: &endpoint, UsePathStyle: true, HTTPClient: &http.Client{Transport: transport},
		Credentials: credentials.NewStaticCredentialsProvider(u.User.Username(), secret, ""),
		DisableLogOutputChecksumValidationSkipped: true,
	})
	owns := client{
		ping: func(ctx context.Context) error {
			_, err := c.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &bucket})
			return err
		},
		close: func() error { transport.CloseIdleConnections(); return nil },
	}
	if err := owns.ping(ctx); err != nil {
		_, err := c.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: &bucket})
		if _, exists := errors.AsType[*types.BucketAlreadyOwnedByYou](err); err != nil && !exists { // another process has created it meanwhile
			return nil, errors.Join(fmt.Errorf("locks: create bucket %s: %w", bucket, err), owns.close())
		}
	}
	b, err := s3lock.Open(ctx, c, bucket, nil)
	return opened(b, err, owns)
}
