package stores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/resource/s3store"
)

// On returns the address of a bucket or table on the server at a URL.
func On(store, name, server string) string {
	u, err := url.Parse(server)
	if err != nil {
		return server // Open refuses it
	}
	to := url.URL{Scheme: store, User: u.User, Host: name, RawQuery: "endpoint=" + u.Scheme + "://" + u.Host}
	return to.String()
}

// awsConfig takes credentials from u or the environment.
func awsConfig(u *url.URL, o Options) (config aws.Config, closeIdle func() error, err error) {
	client, transport := httpClient(o.Fresh)
	q := u.Query()
	config = aws.Config{
		Region: cmp.Or(q.Get("region"), os.Getenv("AWS_REGION"), "us-east-1"), HTTPClient: client,
		// A write is sent once: the SDK would retry when a hazard breaks the connection.
		Retryer: func() aws.Retryer { return aws.NopRetryer{} },
	}
	if endpoint := q.Get("endpoint"); endpoint != "" {
		config.BaseEndpoint = &endpoint
		at, err := url.Parse(endpoint)
		if err != nil || at.Scheme != "http" && at.Scheme != "https" || at.Host == "" || at.User != nil {
			return config, nil, errors.New("stores: the endpoint of " + u.Scheme + " is not of the form http://HOST:PORT or https://HOST:PORT")
		}
	}
	q.Del("region")
	q.Del("endpoint")
	if u.Host == "" || len(q) > 0 || u.Scheme == DynamoDB && strings.Trim(u.Path, "/") != "" {
		return config, nil, fmt.Errorf("stores: the %s address is not of the form %s://[ID:SECRET@]NAME?endpoint=URL&region=NAME", u.Scheme, u.Scheme)
	}
	id, secret := u.User.Username(), ""
	session := ""
	if u.User != nil {
		secret, _ = u.User.Password()
	} else {
		id, secret, session = os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY"), os.Getenv("AWS_SESSION_TOKEN")
	}
	if id == "" || secret == "" {
		return config, nil, fmt.Errorf("stores: there are no credentials for %s: put them into the address, or set "+
			"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", u.Redacted())
	}
	config.Credentials = credentials.NewStaticCredentialsProvider(id, secret, session)
	return config, func() error { transport.CloseIdleConnections(); return nil }, nil
}

func openS3(ctx context.Context, u *url.URL, o Options) (*Store, error) {
	config, closeIdle, err := awsConfig(u, o)
	if err != nil {
		return nil, err
	}
	bucket := u.Host
	client := s3.NewFromConfig(config, func(o *s3.Options) { o.UsePathStyle = config.BaseEndpoint != nil })
	open := s3store.Open
	if o.Prepared {
		open = func(_ context.Context, c *s3.Client, bucket string, opts *s3store.Options) (*s3store.Store, error) {
			return s3store.New(c, bucket, opts)
		}
	} else if err := createBucket(ctx, client, bucket, config.Region); err != nil {
		return nil, errors.Join(err, closeIdle())
	}
	prefix := strings.Trim(u.Path, "/")
	if prefix != "" {
		prefix += "/"
	}
	s, err := open(ctx, client, bucket, &s3store.Options{Prefix: prefix})
	return opened(S3, s, err, closeIdle)
}

func createBucket(ctx context.Context, c *s3.Client, bucket, region string) error {
	if _, err := c.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &bucket}); err == nil {
		return nil
	}
	in := &s3.CreateBucketInput{Bucket: &bucket}
	if region != "us-east-1" { // the default must not be named
		in.CreateBucketConfiguration = &types.CreateBucketConfiguration{LocationConstraint: types.BucketLocationConstraint(region)}
	}
	_, err := c.CreateBucket(ctx, in)
	_, exists := errors.AsType[*types.BucketAlreadyOwnedByYou](err) // created by another process meanwhile
	if err != nil && !exists {
		return fmt.Errorf("stores: create bucket %s: %w", bucket, err)
	}
	return nil
}

func openDynamoDB(ctx context.Context, u *url.URL, o Options) (*Store, error) {
	config, closeIdle, err := awsConfig(u, o)
	if err != nil {
		return nil, err
	}
	client := dynamodb.NewFromConfig(config)
	if !o.Prepared {
		if err := dynamostore.CreateTable(ctx, client, u.Host); err != nil {
			return nil, errors.Join(err, closeIdle())
		}
	}
	s, err := dynamostore.New(client, u.Host)
	return opened(DynamoDB, s, err, closeIdle)
}
