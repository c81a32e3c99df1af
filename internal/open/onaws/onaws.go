// Package onaws reads the addresses of buckets and tables, on Amazon's or compatible servers.
package onaws

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
)

// The schemes of addresses, SCHEME://[ID:SECRET@]NAME?endpoint=URL&region=NAME. A bucket's NAME may be BUCKET/PREFIX.
const (
	S3       = "s3"
	DynamoDB = "dynamodb"
)

// On returns the address of a bucket or table on the server at a URL.
func On(scheme, name, server string) string {
	u, err := url.Parse(server)
	if err != nil {
		return server // Config refuses it
	}
	to := url.URL{Scheme: scheme, User: u.User, Host: name, RawQuery: "endpoint=" + u.Scheme + "://" + u.Host}
	return to.String()
}

// findTimeout bounds the search for credentials, which may ask a machine's metadata service.
const findTimeout = 5 * time.Second

// Config returns u's configuration. Without credentials in u, those of the environment are used: variables, a profile, or the role of a
// machine or pod, which are renewed when they expire. Errors don't quote u's secret.
func Config(ctx context.Context, u *url.URL, client *http.Client) (aws.Config, error) {
	q := u.Query()
	endpoint, region := q.Get("endpoint"), q.Get("region")
	if endpoint != "" {
		at, err := url.Parse(endpoint)
		if err != nil || at.Scheme != "http" && at.Scheme != "https" || at.Host == "" || at.User != nil {
			return aws.Config{}, errors.New("the endpoint of " + u.Scheme + " is not of the form http://HOST:PORT or https://HOST:PORT")
		}
	}
	q.Del("region")
	q.Del("endpoint")
	if u.Host == "" || len(q) > 0 || u.Scheme == DynamoDB && strings.Trim(u.Path, "/") != "" {
		return aws.Config{}, fmt.Errorf("the %s address is not of the form %s://[ID:SECRET@]NAME?endpoint=URL&region=NAME", u.Scheme, u.Scheme)
	}
	var c aws.Config
	if u.User != nil {
		secret, _ := u.User.Password()
		c = aws.Config{
			HTTPClient: client, Region: os.Getenv("AWS_REGION"),
			Credentials: credentials.NewStaticCredentialsProvider(u.User.Username(), secret, ""),
		}
	} else {
		var err error
		if c, err = config.LoadDefaultConfig(ctx); err != nil {
			return c, err
		}
		// No more of the environment: its endpoints would go before u's, or stand for Amazon's.
		c = aws.Config{HTTPClient: client, Region: c.Region, Credentials: c.Credentials}
	}
	c.Region = cmp.Or(region, c.Region, "us-east-1")
	if endpoint != "" {
		c.BaseEndpoint = &endpoint
	}
	find, cancel := context.WithTimeout(ctx, findTimeout)
	defer cancel()
	if _, err := c.Credentials.Retrieve(find); err != nil {
		if ctx.Err() != nil {
			return c, context.Cause(ctx)
		}
		return c, fmt.Errorf("there are no credentials for %s: put them into the address, or set AWS_ACCESS_KEY_ID and "+
			"AWS_SECRET_ACCESS_KEY, or AWS_PROFILE: %w", u.Redacted(), err)
	}
	return c, nil
}

// Bucket is an address's bucket.
type Bucket struct {
	Client *s3.Client
	Name   string
	Prefix string // empty, or ends with a slash
	region string
}

// OpenBucket sends nothing.
func OpenBucket(u *url.URL, c aws.Config) Bucket {
	client := s3.NewFromConfig(c, func(o *s3.Options) {
		o.UsePathStyle, o.DisableLogOutputChecksumValidationSkipped = c.BaseEndpoint != nil, true
	})
	prefix := strings.Trim(u.Path, "/")
	if prefix != "" {
		prefix += "/"
	}
	return Bucket{client, u.Host, prefix, c.Region}
}

// Check returns an error if the bucket doesn't exist or the server doesn't reply.
func (b Bucket) Check(ctx context.Context) error {
	_, err := b.Client.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &b.Name})
	if _, missing := errors.AsType[*types.NotFound](err); missing {
		return fmt.Errorf("there is no bucket %s; 'aws s3 mb s3://%s' creates it: %w", b.Name, b.Name, err)
	}
	return err
}

// Create creates the bucket, unless it exists.
func (b Bucket) Create(ctx context.Context) error {
	if b.Check(ctx) == nil {
		return nil
	}
	in := &s3.CreateBucketInput{Bucket: &b.Name}
	if b.region != "us-east-1" { // the default must not be named
		in.CreateBucketConfiguration = &types.CreateBucketConfiguration{LocationConstraint: types.BucketLocationConstraint(b.region)}
	}
	_, err := b.Client.CreateBucket(ctx, in)
	_, exists := errors.AsType[*types.BucketAlreadyOwnedByYou](err) // by another process meanwhile
	if err != nil && !exists {
		return fmt.Errorf("create bucket %s: %w", b.Name, err)
	}
	return nil
}
